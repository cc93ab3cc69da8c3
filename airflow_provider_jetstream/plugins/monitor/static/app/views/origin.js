/** Which DAG made a job, as a way there; and what to call the job. */

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

/** @returns {string} a job's id without what its origin says anyway; a task's jobs are numbered where they have no key */
export function jobName({ job_id: id, origin }) {
  const made = origin && `${origin.dag_id}/${origin.run_id}/${origin.task_id}/${origin.map_index}/`;
  if (!made || !id.startsWith(made)) return id;
  const rest = id.slice(made.length);
  return rest.startsWith("#") ? `${origin.task_id} job ${rest.slice(1)}` : rest;
}
