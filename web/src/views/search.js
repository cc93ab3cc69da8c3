/** Letters that hold a text: shown as the server finds them. */

import { searchLetters } from "../api.js";
import { counted, exact } from "../format.js";
import { html, useEffect, useRef, useState } from "../html.js";
import { Empty, Failure } from "../components.js";
import { selectionOf } from "../selection.js";
import { Table } from "../table.js";

/** @import { FoundLetter as Found, SearchProgress as Progress, SearchEnd } from "../api_types" */
/** @import { ApiError } from "../api.js" */

const LIMIT = 100;
const PLACES = { job_id: "job id", error: "error", body: "body", header: "header" };
const REASONS = {
  all: "all were read",
  limit: `the first ${LIMIT} are shown`,
  time: "the time was over before all were read",
  error: "the search failed",
};

/**
 * @typedef {object} Result
 * @property {Found[]} found
 * @property {Progress | null} progress
 * @property {SearchEnd | null} end
 */

/** @param {Result} result @param {Found | Progress | SearchEnd} line @returns {Result} */
export function withLine(result, line) {
  if (line.type === "found") return { ...result, found: [...result.found, line] };
  return line.type === "progress" ? { ...result, progress: line } : { ...result, end: line };
}

/** The letters with the text in the address. */
export function SearchResults({ connection, queue, query, columns }) {
  const [result, setResult] = useState(/** @type {Result} */ ({ found: [], progress: null, end: null }));
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  const [round, setRound] = useState(0);
  const [stopped, setStopped] = useState(false);
  const request = useRef(/** @type {AbortController | null} */ (null));
  useEffect(() => {
    const controller = new AbortController();
    request.current = controller;
    setStopped(false);
    setError(null);
    setResult({ found: [], progress: null, end: null });
    const parameters = selectionOf(query);
    parameters.set("text", query.get("text") ?? "");
    if (query.get("where")) parameters.set("where", query.get("where") ?? "");
    parameters.set("limit", String(LIMIT));
    const add = (line) => setResult((old) => withLine(old, line));
    searchLetters(connection, queue, parameters, add, controller.signal).catch((problem) => {
      if (!controller.signal.aborted) setError(problem);
    });
    return () => controller.abort();
  }, [round]);
  const { found, progress, end } = result;
  const running = !end && !error && !stopped;
  const stop = () => {
    request.current?.abort();
    setStopped(true);
  };
  const place = { key: "where", label: "Found in", cell: (item) => item.where.map((name) => PLACES[name] ?? name).join(", ") };
  return html`
    <div class="toolbar spread">
      <p class="number" role="status">
        <strong>${exact(found.length)}</strong> found
        <span class="aside">
          ${!end && progress && `${exact(progress.read)} of ${exact(progress.of)} letters read`}${stopped && "; stopped"}
          ${end && `in ${counted(end.read, "letter")}; ${REASONS[end.reason]}${end.problem ? `: ${end.problem}` : ""}`}
          ${end && end.not_shown > 0 && `; ${counted(end.not_shown, "letter")} of DAGs that you may not see aren't shown`}
        </span>
      </p>
      ${running && html`<button type="button" onClick=${stop}>Stop</button>`}
    </div>
    ${running && progress && html`<progress class="progress" aria-label="Letters read" max=${Math.max(1, progress.of)} value=${progress.read}></progress>`}
    ${error && html`<${Failure} error=${error} reload=${() => setRound(round + 1)} />`}
    ${
      found.length > 0 &&
      html`<div class="panel letters"><${Table} caption="Found letters"
        columns=${[...columns.map((column) => ({ ...column, sortable: false, cell: (item) => column.cell(item.letter) })), place]}
        rows=${found} rowKey=${(item) => item.letter.sequence} /></div>`
    }
    ${end && !found.length && html`<${Empty} title=${end.reason === "all" ? "Nothing found" : "Nothing found so far"}>No letter ${end.reason === "all" ? "of this selection" : "that was read"} holds that text.<//>`}
  `;
}
