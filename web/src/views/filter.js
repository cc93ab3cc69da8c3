/** What restricts the letters that are shown: fields, a text, a range of times; and the state of the scan. */

import { ago, clock, exact } from "../format.js";
import { html } from "../html.js";
import { Failure, Loading } from "../components.js";
import { go, withChanges } from "../routing.js";
import { FIELDS, asSelect } from "../selection.js";
import { airflowZone, momentOf, toField, toUtc } from "../zone.js";

/** @import { ScanState } from "../api_types" */

/** Beside the selection: shown as a filter, too. */
const RANGE = { died_from: "died from", died_to: "died to", text: "text" };

/**
 * Each field of the filter, with a link that removes it.
 *
 * @param {object} props
 * @param {URLSearchParams} props.query holds the selection
 * @param {(query: URLSearchParams) => string} props.to the address of another selection
 */
export function Filter({ query, to }) {
  const select = asSelect(query);
  const fields = Object.entries(select)
    .filter(([name]) => name !== "parked")
    .map(([name, value]) => [name, FIELDS[name] ?? name, [value].flat().join(", ")]);
  for (const [name, label] of Object.entries(RANGE)) {
    const value = name === "text" ? query.get(name) : momentOf(query.get(name));
    if (value) fields.push([name, label, name === "text" ? value : clock(value)]);
  }
  if (!fields.length) return null;
  return html`
    <ul class="filter" aria-label="Filter">
      ${fields.map(
        ([name, label, value]) => html`<li key=${name}>
          <span class="hint">${label}</span> <code>${value}</code>
          <a href=${to(withChanges(query, { [name]: null, page: null, where: null }))} aria-label=${`Drop the filter on ${label}`}>×</a>
        </li>`,
      )}
    </ul>
  `;
}

const PLACES = { job_id: "job ids", error: "errors", body: "bodies", header: "headers" };

/** A field for a text that letters are searched for. */
export function Finder({ query, to }) {
  const submit = (event) => {
    event.preventDefault();
    const { text, where } = /** @type {Record<string, string>} */ (Object.fromEntries(new FormData(event.currentTarget)));
    go(to(withChanges(query, { text: text.trim(), where: text.trim() && where, page: null })));
  };
  return html`
    <form class="finder" role="search" onSubmit=${submit}>
      <input type="search" name="text" aria-label="Find letters" placeholder="Find a job id, error, body or header" defaultValue=${query.get("text") ?? ""} />
      <select name="where" aria-label="Where to search" defaultValue=${query.get("where") ?? ""}>
        <option value="">everywhere</option>
        ${Object.entries(PLACES).map(([name, label]) => html`<option key=${name} value=${name} selected=${query.get("where") === name}>in ${label}</option>`)}
      </select>
      <button type="submit">Find</button>
    </form>
  `;
}

/** Fields for the range of the times of death, in Airflow's zone. */
export function TimeRange({ query, to }) {
  const zone = airflowZone();
  const field = (name, label) => html`<label class="inline">
    ${label}
    <input type="datetime-local" aria-label=${`${label} (${zone})`} value=${toField(momentOf(query.get(name)), zone)}
      onChange=${(event) => go(to(withChanges(query, { [name]: toUtc(event.currentTarget.value, zone), page: null })))} />
  </label>`;
  return html`<span class="range" title=${`Times in ${zone}`}>${field("died_from", "Died from")} ${field("died_to", "to")}</span>`;
}

/** @param {{scan: ScanState, reload: () => void}} props the scan that the letters come from */
export function ScanNote({ scan, reload }) {
  if (scan.state === "failed" && !scan.scanned_at) {
    const error = Object.assign(new Error(scan.problem?.message), { status: 503, code: scan.problem?.code, transient: true });
    return html`<${Failure} error=${error} reload=${reload} />`;
  }
  if (scan.state === "scanning" && !scan.scanned_at) {
    return html`<p class="hint" role="status">First scan of the dead letters: ${exact(scan.seen)} so far.</p>
      <${Loading} what="dead letters" rows=${4} />`;
  }
  return html`<p class="hint" role="status">
    As of ${ago(scan.scanned_at)}${scan.state === "failed" ? `; the last scan failed: ${scan.problem?.message}` : ""}${
      scan.complete ? "" : "; only the first letters by sequence are indexed, so counts are lower bounds"
    }.
  </p>`;
}

/** @param {ScanState} scan @returns {boolean} whether the first scan hasn't ended */
export const firstScan = (scan) => !scan.scanned_at;
