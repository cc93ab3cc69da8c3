/** How a queue is, in one word. */

import { html } from "./html.js";
import { Badge } from "./parts.js";

const STATES = {
  working: ["good", "Working", "Jobs end"],
  idle: ["plain", "Idle", "Nothing to do"],
  waiting: ["warn", "Waiting", "Jobs are pending or in flight, and none ended between the last two looks"],
  stuck: ["bad", "Stuck", "Jobs are pending, no worker asks for them, and none is in flight"],
  unknown: ["plain", "Unknown", "Not seen yet"],
};

/** @returns {number | null} dead letters, as certain as they are known */
export const deadOf = (numbers) => numbers.letters?.certain ?? numbers.dead_in_queue;

/** @returns {number} 0 for what a person has to look at first; below 3 something is wrong */
export function attention(numbers) {
  if (numbers.problem || numbers.state === "stuck") return 0;
  if (deadOf(numbers) > 0) return 1;
  if (numbers.limits.some((limit) => limit.share >= 0.9 && limit.name !== "max_age")) return 2;
  return { waiting: 3, working: 4, idle: 5 }[numbers.state] ?? 6;
}

/** The word, in its colour. */
export function StateBadge({ numbers }) {
  if (numbers.problem) return html`<${Badge} tone="bad" title=${numbers.problem.message}>Problem<//>`;
  const [tone, word, meaning] = STATES[numbers.state] ?? STATES.unknown;
  return html`<${Badge} tone=${tone} title=${meaning}>${word}<//>`;
}
