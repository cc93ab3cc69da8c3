/** The state of a queue. */

import { html } from "./html.js";
import { Badge } from "./components.js";

const STATES = {
  working: ["good", "Working", "Jobs end"],
  idle: ["plain", "Idle", "No jobs"],
  waiting: ["warn", "Waiting", "Jobs are pending or in flight, and none ended between the last two polls"],
  stuck: ["bad", "Stuck", "Jobs are pending, no worker pulls them, and none is in flight"],
  unknown: ["plain", "Unknown", "Not polled yet"],
};

/** @returns {number | null} certain dead letters, or those counted in the queue before the first scan */
export const deadOf = (numbers) => numbers.letters?.certain ?? numbers.dead_in_queue;

/** @returns {number} 0 for the most urgent queue; below 3 something is wrong */
export function attention(numbers) {
  if (numbers.problem || numbers.state === "stuck") return 0;
  if (deadOf(numbers) > 0) return 1;
  if (numbers.limits.some((limit) => limit.share >= 0.9 && limit.name !== "max_age")) return 2;
  return { waiting: 3, working: 4, idle: 5 }[numbers.state] ?? 6;
}

/** The state as a badge. */
export function StateBadge({ numbers }) {
  if (numbers.problem) return html`<${Badge} tone="bad" title=${numbers.problem.message}>Problem<//>`;
  const [tone, word, meaning] = STATES[numbers.state] ?? STATES.unknown;
  return html`<${Badge} tone=${tone} title=${meaning}>${word}<//>`;
}
