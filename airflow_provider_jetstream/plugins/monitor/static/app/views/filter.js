/** The filter, each field with a link that removes it; and the state of the scan. */

import { ago, exact } from "../format.js";
import { html } from "../html.js";
import { Failure, Loading } from "../components.js";
import { FIELDS, asQuery, asSelect } from "../selection.js";

/**
 * @param {object} props
 * @param {URLSearchParams} props.query holds the selection
 * @param {(query: URLSearchParams) => string} props.to the address of another selection
 */
export function Filter({ query, to }) {
  const select = asSelect(query);
  const fields = Object.entries(select).filter(([name]) => name !== "parked");
  if (!fields.length) return null;
  const without = (name) => asQuery(Object.fromEntries(Object.entries(select).filter(([item]) => item !== name)));
  return html`
    <ul class="filter" aria-label="Filter">
      ${fields.map(
        ([name, value]) => html`<li key=${name}>
          <span class="hint">${FIELDS[name] ?? name}</span> <code>${[value].flat().join(", ")}</code>
          <a href=${to(without(name))} aria-label=${`Drop the filter on ${FIELDS[name] ?? name}`}>×</a>
        </li>`,
      )}
    </ul>
  `;
}

/** @param {{scan: object, reload: () => void}} props the scan that the letters come from */
export function ScanNote({ scan, reload }) {
  if (scan.state === "failed" && !scan.scanned_at) {
    return html`<${Failure} error=${Object.assign(new Error(scan.problem?.message), { status: 503, transient: true })} reload=${reload} />`;
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

/** @returns {boolean} whether the first scan hasn't ended */
export const firstScan = (scan) => !scan.scanned_at;
