/** Groups of dead letters by shared fields, so that a thousand letters are a few causes. */

import { getGroups } from "../api.js";
import { ActionButtons } from "../actions.js";
import { counted, exact, percent, shortened } from "../format.js";
import { Shown, sizeOf } from "../figure.js";
import { html } from "../html.js";
import { Ago, Badge, Empty, Loading, PollError } from "../components.js";
import { usePoll } from "../polling.js";
import { go, groupsAddress, letterAddress, lettersAddress, replaceQuery, withChanges } from "../routing.js";
import { GROUPINGS, REASONS, asQuery, asSelect } from "../selection.js";
import { useMe } from "../session.js";
import { Table } from "../table.js";
import { Advice, Diagnosis, adviceFor, useDiagnosis } from "./diagnosis.js";
import { Filter, ScanNote, firstScan } from "./filter.js";
import { QueueHead, useQueue } from "./queue_head.js";

/** Fields with short values. */
const SHORT = new Set(["fingerprint", "traceback_digest", "consumer"]);
const BY_CAUSE = ["reason", "error_class", "fingerprint"];
/** A diagnosis reads every letter: of more than the first it is made seldom, of more than the second when asked for. */
const [FEW, MANY] = [2_000, 100_000];

/** The groups of a queue's letters, or of its parked letters. */
export function GroupsView({ connection, queue, query }) {
  const me = useMe();
  const head = useQueue(connection, queue);
  const select = asSelect(query);
  const chosen = query.getAll("group_by").filter((name) => name in GROUPINGS);
  const groupBy = chosen.length ? chosen : BY_CAUSE;
  const parameters = asQuery({ ...select, group_by: groupBy });
  const poll = usePoll(
    (signal) => getGroups(connection, queue, parameters, signal),
    me.refresh_seconds,
    `${connection}/${queue}?${parameters}`,
  );
  const groups = poll.data;
  const address = { connection, queue };
  const diagnose = query.get("diagnose") === "yes" && !select.parked;
  const total = groups?.total.value ?? 0;
  const diagnosis = useDiagnosis({ ...address, select }, !select.parked && total > 0 && (diagnose || total <= MANY), total > FEW);
  const to = (other, fields = chosen) => groupsAddress(connection, queue, asQuery({ ...asSelect(other), group_by: fields }));
  const toggle = (name) => {
    const fields = Object.keys(GROUPINGS).filter((item) => groupBy.includes(item) !== (item === name));
    go(to(query, fields.length ? fields : BY_CAUSE));
  };
  return html`
    <${QueueHead} ...${address} poll=${head} tab=${select.parked ? "parked" : "dead"} />
    <${PollError} poll=${poll} />
    ${!groups && !poll.error && html`<${Loading} what="dead letters" rows=${6} />`}
    ${
      groups &&
      html`
        <${Filter} query=${query} to=${to} />
        <fieldset class="grouping">
          <legend>Group by</legend>
          ${Object.entries(GROUPINGS).map(
            ([name, label]) => html`<label key=${name}>
              <input type="checkbox" checked=${groupBy.includes(name)} onChange=${() => toggle(name)} />${label}
            </label>`,
          )}
        </fieldset>
        <${ScanNote} scan=${groups.scan} reload=${poll.reload} />
        ${
          !select.parked &&
          sizeOf(groups.total) > 0 &&
          html`<p class="toolbar">
            <button type="button" aria-expanded=${diagnose} onClick=${() => replaceQuery(withChanges(query, { diagnose: diagnose ? null : "yes" }))}>
              Diagnosis
            </button>
          </p>`
        }
        ${diagnose && html`<${Diagnosis} ...${{ ...address, poll: diagnosis }} />`}
        ${!firstScan(groups.scan) && html`<${GroupsPanel} ...${{ ...address, groups, select, diagnosis: diagnosis.data, reading: !diagnosis.data && !diagnosis.error && total > 0 && total <= MANY }} />`}
      `
    }
  `;
}

function GroupsPanel({ connection, queue, groups, select, diagnosis, reading }) {
  const me = useMe();
  if (!sizeOf(groups.total)) {
    return html`<${Empty} title=${select.parked ? "Nothing is parked" : "No dead letters"}>
      ${
        sizeOf(groups.uncertain)
          ? `${counted(groups.uncertain.value, "job")} may be dead; that can't be proved while jobs are in flight.`
          : select.parked
            ? "Parked letters stay here until they are redriven."
            : "Every job of this queue completed, or hasn't ended yet."
      }
    <//>`;
  }
  const everything = !Object.keys(select).length;
  const editing = me.payloads ? ["edit"] : [];
  const actions = select.parked ? ["redrive", "discard"] : everything ? ["redrive", "park", "discard", "in_place"] : ["redrive", "park", "discard"];
  return html`
    <div class="toolbar spread">
      <p class="number">
        <strong><${Shown} of=${groups.total} show=${exact} /></strong> ${groups.total.value === 1 ? "letter" : "letters"} in
        ${` ${counted(groups.groups.length + groups.groups_left_out, "group")}`}${
          sizeOf(groups.uncertain) ? html` <span class="aside">and <${Shown} of=${groups.uncertain} show=${exact} dated=${false} /> that may be dead</span>` : ""
        }
      </p>
      <${ActionButtons} ...${{ connection, queue, select, actions: [...actions, ...editing] }} what="all of them" main=${true} advice=${diagnosis?.groups[0]} />
    </div>
    <div class="panel">
      <${Table} caption="Groups of dead letters" columns=${columnsFor({ connection, queue, groups, select, diagnosis, reading, mayAct: me.may_act })}
        rows=${groups.groups} rowKey=${(group) => JSON.stringify(group.key)} />
    </div>
    ${groups.not_shown > 0 && html`<p class="hint">${counted(groups.not_shown, "letter")} of DAGs that you may not see aren't shown.</p>`}
    ${groups.groups_left_out > 0 && html`<p class="hint">${counted(groups.groups_left_out, "smaller group")} aren't shown; narrow the filter.</p>`}
  `;
}

function columnsFor({ connection, queue, groups, select, diagnosis, reading, mayAct }) {
  const shown = groups.group_by.filter((name) => name !== "reason");
  return [
    {
      key: "count", label: "Letters", head: true,
      cell: (group) => html`<a class="number-bad" href=${lettersOf(connection, queue, group, select)}
        aria-label=${`Show ${counted(sizeOf(group.count), "letter")}`}><${Shown} of=${group.count} dated=${false} /></a>
        <span class="aside whole">${percent(group.share)}</span>`,
    },
    ...(groups.group_by.includes("reason")
      ? [{ key: "reason", label: "Reason", cell: (group) => html`<${Reason} reason=${group.key.reason} />` }]
      : []),
    { key: "error", label: "Error text", wide: true, cell: (group) => html`<${ErrorText} text=${group.error_message} to=${lettersOf(connection, queue, group, select)} />` },
    reading && !select.parked && { key: "advice", label: "What to do", wide: true, cell: () => html`<span class="aside">the letters are being read …</span>` },
    diagnosis && { key: "advice", label: "What to do", wide: true, cell: (group) => html`<${Advice} advice=${adviceFor(group, diagnosis)} />` },
    ...shown.map((name) => ({ key: name, label: GROUPINGS[name] ?? name, wide: !SHORT.has(name), cell: (group) => html`<${Value} value=${group.key[name]} />` })),
    { key: "first", label: "First", cell: (group) => html`<${Ago} time=${group.first_seen} />` },
    { key: "last", label: "Last", cell: (group) => html`<${Ago} time=${group.last_seen} />` },
    mayAct && {
      key: "act", label: "Act", wide: true,
      cell: (group) => html`<${ActionButtons} ...${{ connection, queue, select: group.select && { ...group.select, ...select } }}
        actions=${select.parked ? ["redrive", "discard"] : ["redrive", "park", "discard"]}
        advice=${diagnosis && adviceFor(group, diagnosis)}
        what=${`${counted(sizeOf(group.count), "letter")}: ${Object.values(group.key).filter(Boolean).join(", ")}`} />`,
    },
  ].filter(Boolean);
}

const ErrorText = ({ text, to }) =>
  text ? html`<a class="error-text" href=${to} title=${text}>${shortened(text, 160)}</a>` : html`<span class="aside">none was recorded</span>`;

/** The letters of a group; where no selection matches exactly the group, one of its letters. */
const lettersOf = (connection, queue, group, select) =>
  group.select
    ? lettersAddress(connection, queue, asQuery({ ...group.select, ...select }))
    : letterAddress(connection, queue, group.example, asQuery(select));

/** The reason of a death in words; its name in filters is the tooltip. */
export const Reason = ({ reason }) => html`<${Badge} tone="bad" title=${reason}>${REASONS[reason] ?? reason}<//>`;

const Value = ({ value }) => (value == null ? html`<span class="aside">none</span>` : html`<code>${value}</code>`);
