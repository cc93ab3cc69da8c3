/** What a queue's dead letters died of, and what to do about them: read when somebody asks for it. */

import { getDiagnosis } from "../api.js";
import { clock, counted, exact, percent } from "../format.js";
import { html } from "../html.js";
import { Badge, Facts, Loading, PollError } from "../components.js";
import { usePoll } from "../polling.js";
import { asQuery } from "../selection.js";
import { lettersAddress } from "../routing.js";

/** @import { DiagnosisView, Group } from "../api_types" */
/** @typedef {Record<string, any>} Cause a group of a diagnosis */

/** Seconds between two diagnoses, and where there are many letters: each reads all of them. */
const [SECONDS, MANY_SECONDS] = [60, 600];
/** @type {Record<string, ["good" | "bad" | "warn" | "info" | "plain", string]>} */
const ACTIONS = {
  nothing: ["plain", "nothing to do"],
  wait: ["bad", "don't redrive yet"],
  try_a_few: ["good", "try a few"],
  repair: ["warn", "repair or park"],
  start_workers: ["warn", "start workers"],
  add_consumer: ["warn", "add a consumer"],
};

/**
 * @param {{connection: string, queue: string, select: object}} of the selected letters
 * @param {boolean} wanted whether to read them
 * @param {boolean} many whether there are many
 */
export function useDiagnosis({ connection, queue, select }, wanted, many) {
  const query = asQuery(select);
  const load = (signal) => (wanted ? getDiagnosis(connection, queue, query, signal) : Promise.resolve(undefined));
  return usePoll(load, many ? MANY_SECONDS : SECONDS, `${connection}/${queue}/diagnosis?${query}/${wanted}`);
}

/** @param {Group} group @param {DiagnosisView} diagnosis @returns {Cause | undefined} what is known of the cause of a group's letters */
export function adviceFor(group, diagnosis) {
  const { reason, error_class: error } = group.key;
  const alike = diagnosis.groups.filter((cause) => cause.reason === reason && cause.error_class === error);
  return alike.find((cause) => cause.example === group.example) ?? (alike.length === 1 ? alike[0] : undefined);
}

/** What to do about a cause, with what speaks for it. @param {{advice: Cause | undefined}} props */
export function Advice({ advice }) {
  if (!advice) return html`<span class="aside">not known</span>`;
  const [tone, word] = ACTIONS[advice.action] ?? ["plain", advice.action];
  return html`<span class="advice">
    <${Badge} tone=${tone}>${word}<//> ${advice.advice}
    <ul class="notes">${(advice.evidence ?? []).map((line) => html`<li key=${line}>${line}</li>`)}</ul>
  </span>`;
}

/** Whether a redrive would do no good now. @param {Cause | undefined} advice */
export const isAgainst = (advice) => Boolean(advice) && !["try_a_few", "nothing"].includes(advice?.action);

/** The diagnosis of the selected letters. */
export function Diagnosis({ connection, queue, poll }) {
  const diagnosis = poll.data;
  return html`
    <section class="diagnosis panel padded" aria-label="Diagnosis">
      <${PollError} poll=${poll} />
      ${!diagnosis && !poll.error && html`<${Loading} what="the diagnosis" rows=${3} />`}
      ${
        diagnosis &&
        html`
          <p><strong>${diagnosis.headline}</strong></p>
          <ol>${diagnosis.groups.map((group, index) => html`<${Cause} key=${index} ...${{ connection, queue, group }} />`)}</ol>
          ${diagnosis.letters_left_out > 0 && html`<p class="hint">${counted(diagnosis.letters_left_out, "letter")} of other causes.</p>`}
          ${diagnosis.uncertain > 0 && html`<p class="hint">${counted(diagnosis.uncertain, "more job")} may be dead.</p>`}
        `
      }
    </section>
  `;
}

const named = (items, name) => items.map((item) => `${item[name]} (${exact(item.count)})`).join(", ");

function Cause({ connection, queue, group }) {
  const what = [group.error_class, group.error_message].filter(Boolean).join(": ") || group.reason;
  return html`
    <li class="cause">
      <p>
        <a href=${lettersAddress(connection, queue, asQuery(group.select))}>${counted(group.count, "letter")}</a>
        <span class="aside">${percent(group.share)}</span> ${what}
      </p>
      <${Advice} advice=${group} />
      <${Facts}
        pairs=${[
          ["Place", group.error_place && html`<code>${group.error_place}</code>`],
          ["First", clock(group.first)],
          ["Last", clock(group.last)],
          ["Consumer", group.consumer],
          ["Subjects", named(group.subjects, "subject")],
          ["Tasks", group.tasks.map((task) => `${task.dag_id}.${task.task_id} (${exact(task.count)})`).join(", ")],
          ["Releases", named(group.releases, "release")],
          ["Completed since", group.completed_since == null ? null : exact(group.completed_since)],
          ["Redriven before", group.redriven ? exact(group.redriven) : null],
        ]}
      />
    </li>
  `;
}
