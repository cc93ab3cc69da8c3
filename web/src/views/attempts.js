/** Attempts at a job, as far as its workers store them. */

import { clock, percent, took } from "../format.js";
import { html } from "../html.js";
import { Ago } from "../components.js";

/** @import { JobAttempt } from "../api_types" */

/** Progress or the error of the last attempt at a job, with its age, for a table. @param {{attempt: JobAttempt | null}} props */
export function LastAttempt({ attempt }) {
  if (!attempt) return html`<span class="aside">not known</span>`;
  return html`<span class="long" title=${textOf(attempt)}>
    ${textOf(attempt)}${attempt.at && html` <span class="aside"><${Ago} time=${attempt.at} /></span>`}
  </span>`;
}

/** All attempts at a job, the first one first. @param {{attempts: JobAttempt[]}} props */
export const AttemptList = ({ attempts }) => html`
  <ol class="timeline panel" aria-label="Attempts">
    ${attempts.map(
      (attempt) => html`<li key=${attempt.number} class=${attempt.state}>
        <span>
          attempt ${attempt.number}: ${textOf(attempt)}
          ${attempt.error_place && html` <code>${attempt.error_place}</code>`}
          <span class="aside">${[attempt.worker, attempt.seconds != null && took(attempt.seconds)].filter(Boolean).join(", ")}</span>
        </span>
        <time class="hint">${attempt.at ? html`${clock(attempt.at)}, <${Ago} time=${attempt.at} />` : "at an unknown time"}</time>
      </li>`,
    )}
  </ol>
`;

/** @param {JobAttempt} attempt */
function textOf(attempt) {
  if (attempt.state !== "running") {
    return [attempt.error_class, attempt.error_message].filter(Boolean).join(": ") || "failed";
  }
  return [attempt.fraction != null && percent(attempt.fraction), attempt.text].filter(Boolean).join(", ") || "running";
}
