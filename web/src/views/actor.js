/** Who did something: a person, an Airflow task, or another program. */

import { AirflowLink, runAddress } from "../airflow.js";
import { html } from "../html.js";

/** @param {{who: Record<string, any>, user?: string | null}} props */
export function Actor({ who, user }) {
  const run =
    who.dag_id && who.run_id && html`<${AirflowLink} to=${runAddress(who.dag_id, who.run_id)} title=${who.run_id}>a run of ${who.dag_id}<//>`;
  const others = run ? "" : Object.values(who).filter((value) => typeof value !== "object").join(", ");
  if (user) return html`by <strong>${user}</strong>${run && html`, ${run}`}`;
  if (run) return html`by ${run}`;
  return others ? `by ${others}` : null;
}
