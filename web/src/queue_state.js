/** The state of a queue and of its consumers, with the evidence that shows it. */

import { html } from "./html.js";
import { Badge } from "./components.js";
import { AsOf, isOld, sizeOf } from "./figure.js";

/** @import { ConsumerNumbers, QueueNumbers, StateFinding } from "./api_types" */
/** @typedef {QueueNumbers["state"]} State */

/** @type {Record<State, ["good" | "bad" | "warn" | "plain", string, string]>} */
const STATES = {
  no_consumer: ["bad", "No consumer", "Jobs are stored, and the stream has no consumer"],
  stuck: ["bad", "Stuck", "Jobs are pending and nobody pulls, or none ends"],
  unserved: ["bad", "Unserved", "Some jobs have no consumer, or their consumer has no worker while others have"],
  full: ["bad", "Full", "The stream is at a limit"],
  dying: ["bad", "Dying", "Jobs died in the last minutes"],
  paused: ["warn", "Paused", "A consumer is paused and has jobs"],
  waiting: ["warn", "Waiting", "Jobs are pending or in flight, and none has ended yet"],
  working: ["good", "Working", "Jobs end"],
  dead: ["warn", "Dead letters", "No jobs, but dead letters"],
  idle: ["plain", "Idle", "No jobs"],
  unknown: ["plain", "Unknown", "Not polled yet"],
};
/** @type {Partial<Record<State, number>>} */
const URGENCY = { no_consumer: 0, stuck: 0, unserved: 0, full: 0, dying: 0.5, paused: 2, waiting: 3, working: 4, idle: 5 };

/** States in which jobs don't end, and somebody has to do something. */
export const NEEDS_SOMEBODY = new Set(["no_consumer", "stuck", "unserved", "full"]);

/** @param {QueueNumbers} numbers @returns {number} 0 for the most urgent queue; below 3 something is wrong */
export function attention(numbers) {
  const urgency = URGENCY[numbers.state] ?? 6;
  if (numbers.problem || urgency < 1) return urgency < 1 ? urgency : 0;
  if (sizeOf(numbers.dead) > 0) return 1;
  if (numbers.limits.some((limit) => limit.share >= 0.9 && limit.name !== "max_age")) return 2;
  return urgency;
}

/** The state of a queue as a badge. @param {{numbers: QueueNumbers}} props */
export function StateBadge({ numbers }) {
  if (numbers.problem) return html`<${Badge} tone="bad" title=${numbers.problem.message}>Problem<//>`;
  const evidence = numbers.findings.map(textOf).join(" ");
  const state = html`<${State} state=${numbers.state} evidence=${evidence} />`;
  return isOld(numbers.stored) ? html`<span class="figure old">${state} <${AsOf} of=${numbers.stored} /></span>` : state;
}

/** A state as a badge. @param {{state: State, evidence?: string}} props */
export function State({ state, evidence }) {
  const [tone, word, meaning] = STATES[state] ?? STATES.unknown;
  return html`<${Badge} tone=${tone} title=${evidence || meaning}>${word}<//>`;
}

/** @param {StateFinding} finding */
const textOf = ({ part, name, evidence }) => (part === "queue" ? evidence : `${name}: ${evidence}`);

/** @param {State} state */
export const toneOf = (state) => (STATES[state] ?? STATES.unknown)[0];

/** @param {State} state */
export const wordOf = (state) => (STATES[state] ?? STATES.unknown)[1];
