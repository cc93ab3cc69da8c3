/** The filter as the person sees it, each part with a way out of it; and how far the scan is behind what is shown. */

import { ago, exact } from "../format.js";
import { html } from "../html.js";
import { Failure, Loading } from "../parts.js";
import { FIELDS, asQuery, asSelect } from "../selection.js";

/**
 * @param {object} props
 * @param {URLSearchParams} props.query where the selection stands
 * @param {(query: URLSearchParams) => string} props.to the address of another selection
 */
export function Filter({ query, to }) {
  const select = asSelect(query);
  const parts = Object.entries(select).filter(([name]) => name !== "parked");
  if (!parts.length) return null;
  const without = (name) => asQuery(Object.fromEntries(Object.entries(select).filter(([each]) => each !== name)));
  return html`
    <ul class="filter" aria-label="Filter">
      ${parts.map(
        ([name, value]) => html`<li key=${name}>
          <span class="hint">${FIELDS[name] ?? name}</span> <code>${[value].flat().join(", ")}</code>
          <a href=${to(without(name))} aria-label=${`Drop the filter on ${FIELDS[name] ?? name}`}>×</a>
        </li>`,
      )}
    </ul>
  `;
}

/** @param {{scan: object, reload: () => void}} props what the letters on the page come from */
export function ScanNote({ scan, reload }) {
  if (scan.state === "failed" && !scan.scanned_at) {
    return html`<${Failure} error=${Object.assign(new Error(scan.problem?.message), { status: 503, passing: true })} reload=${reload} />`;
  }
  if (scan.state === "scanning" && !scan.scanned_at) {
    return html`<p class="hint" role="status">Looking at the dead letters for the first time: ${exact(scan.seen)} so far.</p>
      <${Loading} what="dead letters" rows=${4} />`;
  }
  return html`<p class="hint" role="status">
    As of ${ago(scan.scanned_at)}${scan.state === "failed" ? `; the last scan failed: ${scan.problem?.message}` : ""}${
      scan.complete ? "" : "; only the first letters by sequence are held, so counts are lower bounds"
    }.
  </p>`;
}

/** @returns {boolean} whether there is nothing to show yet */
export const firstScan = (scan) => !scan.scanned_at;
