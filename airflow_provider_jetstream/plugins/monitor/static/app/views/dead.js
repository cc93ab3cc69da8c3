/** Dead letters by what they have in common, so that a thousand letters are a few causes. */

import { getGroups } from "../api.js";
import { Act } from "../acting.js";
import { count, counted, exact } from "../format.js";
import { html } from "../html.js";
import { Ago, Badge, Empty, Loading, Stale } from "../parts.js";
import { usePoll } from "../polling.js";
import { go, groupsAddress, letterAddress, lettersAddress } from "../routing.js";
import { GROUPINGS, REASONS, asQuery, asSelect } from "../selection.js";
import { useMe } from "../session.js";
import { Table } from "../table.js";
import { Filter, ScanNote, firstScan } from "./filter.js";
import { QueueHead, useQueue } from "./head.js";

/** What fits where there is little room. */
const SHORT = new Set(["fingerprint", "traceback_digest", "consumer"]);
const BY_CAUSE = ["reason", "error_class", "fingerprint"];

/** The groups of a queue's letters; of the parked ones where the address says so. */
export function DeadView({ connection, queue, query }) {
  const me = useMe();
  const head = useQueue(connection, queue);
  const select = asSelect(query);
  const chosen = query.getAll("group_by").filter((name) => name in GROUPINGS);
  const groupBy = chosen.length ? chosen : BY_CAUSE;
  const asked = asQuery({ ...select, group_by: groupBy });
  const poll = usePoll(
    (signal) => getGroups(connection, queue, asked, signal),
    me.refresh_seconds,
    `${connection}/${queue}?${asked}`,
  );
  const found = poll.data;
  const at = { connection, queue };
  const to = (other, fields = chosen) => groupsAddress(connection, queue, asQuery({ ...asSelect(other), group_by: fields }));
  const toggle = (name) => {
    const fields = Object.keys(GROUPINGS).filter((each) => groupBy.includes(each) !== (each === name));
    go(to(query, fields.length ? fields : BY_CAUSE));
  };
  return html`
    <${QueueHead} ...${at} poll=${head} tab=${select.parked ? "parked" : "dead"} />
    <${Stale} poll=${poll} />
    ${!found && !poll.error && html`<${Loading} what="dead letters" rows=${6} />`}
    ${
      found &&
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
        <${ScanNote} scan=${found.scan} reload=${poll.reload} />
        ${!firstScan(found.scan) && html`<${Found} ...${{ ...at, found, select }} />`}
      `
    }
  `;
}

function Found({ connection, queue, found, select }) {
  const me = useMe();
  if (!found.total) {
    return html`<${Empty} title=${select.parked ? "Nothing is parked" : "No dead letters"}>
      ${
        found.uncertain
          ? `${counted(found.uncertain, "job")} may be dead; it can't be told while jobs are in flight.`
          : select.parked
            ? "What is parked stays here until it is redriven."
            : "Every job of this queue ended well, or is still on its way."
      }
    <//>`;
  }
  const everything = !Object.keys(select).length;
  const actions = select.parked ? ["redrive"] : everything ? ["redrive", "park", "in_place"] : ["redrive", "park"];
  return html`
    <div class="toolbar spread">
      <p class="number">
        <strong>${exact(found.total)}</strong> ${found.total === 1 ? "letter" : "letters"} in
        ${` ${counted(found.groups.length + found.groups_left_out, "group")}`}${
          found.uncertain ? html` <span class="aside">and ${exact(found.uncertain)} that may be dead</span>` : ""
        }
      </p>
      <${Act} ...${{ connection, queue, select, actions }} what="all of them" main=${true} />
    </div>
    <div class="panel">
      <${Table} caption="Groups of dead letters" columns=${columnsFor({ connection, queue, found, select, mayAct: me.may_act })}
        rows=${found.groups} rowKey=${(group) => JSON.stringify(group.key)} />
    </div>
    ${found.groups_left_out > 0 && html`<p class="hint">${counted(found.groups_left_out, "smaller group")} aren't shown; narrow the filter.</p>`}
  `;
}

function columnsFor({ connection, queue, found, select, mayAct }) {
  const shown = found.group_by.filter((name) => name !== "reason");
  return [
    {
      key: "count", label: "Letters", head: true,
      cell: (group) => html`<a class="number-bad" href=${lettersOf(connection, queue, group, select)}
        aria-label=${`Show ${counted(group.count, "letter")}`}>${count(group.count)}</a>`,
    },
    ...(found.group_by.includes("reason")
      ? [{ key: "reason", label: "Reason", cell: (group) => html`<${Reason} reason=${group.key.reason} />` }]
      : []),
    ...shown.map((name) => ({ key: name, label: GROUPINGS[name] ?? name, wide: !SHORT.has(name), cell: (group) => html`<${Value} value=${group.key[name]} />` })),
    { key: "first", label: "First", cell: (group) => html`<${Ago} time=${group.first_seen} />` },
    { key: "last", label: "Last", cell: (group) => html`<${Ago} time=${group.last_seen} />` },
    mayAct && {
      key: "act", label: "Act", wide: true,
      cell: (group) => html`<${Act} ...${{ connection, queue, select: group.select && { ...group.select, ...select } }}
        actions=${select.parked ? ["redrive"] : ["redrive", "park"]}
        what=${`${counted(group.count, "letter")}: ${Object.values(group.key).filter(Boolean).join(", ")}`} />`,
    },
  ].filter(Boolean);
}

/** Where no selection means just this group, one of its letters is better than nothing. */
const lettersOf = (connection, queue, group, select) =>
  group.select
    ? lettersAddress(connection, queue, asQuery({ ...group.select, ...select }))
    : letterAddress(connection, queue, group.example, asQuery(select));

/** Why letters died, in a word; in a sentence where the pointer rests. */
export const Reason = ({ reason }) => html`<${Badge} tone="bad" title=${REASONS[reason]}>${reason}<//>`;

const Value = ({ value }) => (value == null ? html`<span class="aside">none</span>` : html`<code>${value}</code>`);
