/** The origin of a job as a link, and the job's name. */

import { AirflowLink, taskAddress } from "../airflow.js";
import { secondOf } from "../format.js";
import { html } from "../html.js";

/** @import { OriginOfLetter } from "../api_types" */

/** @param {{origin: OriginOfLetter | null, known?: boolean, full?: boolean}} props `known` whether it is known who did; `full` shows the run too */
export function Origin({ origin, known = true, full = false }) {
  if (!origin) return html`<span class="aside">${known ? "not by Airflow" : "not known any more"}</span>`;
  const index = origin.map_index >= 0 ? `[${origin.map_index}]` : "";
  return html`
    <${AirflowLink} to=${taskAddress(origin)} title=${`Run ${origin.run_id}`}>${origin.dag_id}.${origin.task_id}${index}<//>
    ${full && html`<span class="aside">${origin.run_id}</span>`}
  `;
}

/**
 * @param {{job_id: string, sequence: number, subject: string, origin?: OriginOfLetter | null, died_at?: string, stored_at?: string}} job
 * @returns {string} its author's id, without its origin; where it has none, its subject and its time
 */
export function jobName({ job_id: id, origin, sequence, subject, died_at: died, stored_at: stored }) {
  const at = died ?? stored;
  if (id === String(sequence)) return at ? `${subject}, ${secondOf(at)}` : subject;
  const prefix = origin && `${origin.dag_id}/${origin.run_id}/${origin.task_id}/${origin.map_index}/`;
  if (!prefix || !id.startsWith(prefix)) return id;
  const rest = id.slice(prefix.length);
  return rest.startsWith("#") ? `${origin.task_id} job ${rest.slice(1)}` : rest;
}

/** A job's name as a link; its number, which commands take, is in the tooltip. */
export const JobName = ({ letter, to }) => html`<span class="job">
  <a class="name" title=${`${letter.job_id}, stream sequence ${letter.sequence}`} href=${to}>${jobName(letter)}</a>
</span>`;
