/** The origin of a job as a link, and the job's name. */

import { AirflowLink, taskAddress } from "../airflow.js";
import { html } from "../html.js";

/** @param {{origin: object | null, full?: boolean}} props `full` shows the run too */
export function Origin({ origin, full = false }) {
  if (!origin) return html`<span class="aside">not by Airflow</span>`;
  const index = origin.map_index >= 0 ? `[${origin.map_index}]` : "";
  return html`
    <${AirflowLink} to=${taskAddress(origin)} title=${`Run ${origin.run_id}`}>${origin.dag_id}.${origin.task_id}${index}<//>
    ${full && html`<span class="aside">${origin.run_id}</span>`}
  `;
}

/** @returns {string} a job's id without its origin; a number where the task gave no id */
export function jobName({ job_id: id, origin }) {
  const prefix = origin && `${origin.dag_id}/${origin.run_id}/${origin.task_id}/${origin.map_index}/`;
  if (!prefix || !id.startsWith(prefix)) return id;
  const rest = id.slice(prefix.length);
  return rest.startsWith("#") ? `${origin.task_id} job ${rest.slice(1)}` : rest;
}
