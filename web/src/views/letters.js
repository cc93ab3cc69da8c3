/** Dead letters in pages, so that a million of them cost no more than fifty; what is shown is all in the address. */

import { getLetters } from "../api.js";
import { ActionButtons } from "../actions.js";
import { counted, exact, shortened } from "../format.js";
import { Shown, sizeOf } from "../figure.js";
import { html } from "../html.js";
import { Ago, Empty, Loading, PollError } from "../components.js";
import { usePoll } from "../polling.js";
import { go, groupsAddress, letterAddress, lettersAddress, withChanges } from "../routing.js";
import { asSelect, selectionOf } from "../selection.js";
import { useMe } from "../session.js";
import { momentOf } from "../zone.js";
import { Table } from "../table.js";
import { Reason } from "./groups.js";
import { Filter, Finder, ScanNote, TimeRange, firstScan } from "./filter.js";
import { QueueHead, useQueue } from "./queue_head.js";
import { JobName, Origin } from "./origin.js";
import { SearchResults } from "./search.js";

/** @import { LetterLine, LetterPage } from "../api_types" */

const PAGE = 50;
/** Characters of an error's text. */
const SHOWN = 80;
/** The columns that the server sorts by. @type {Record<string, string>} */
const SORTS = { job: "sequence", died: "died_at" };

/** @param {string | null} text @returns {string} an order that the server knows */
export const sortOf = (text) => (text && Object.values(SORTS).includes(text.replace(/^-/, "")) ? text : "-died_at");

/** The letters that match a filter. */
export function LettersView({ connection, queue, query }) {
  const me = useMe();
  const head = useQueue(connection, queue);
  const select = asSelect(query);
  const page = Math.max(1, Math.floor(Number(query.get("page") ?? 1)) || 1);
  const sort = sortOf(query.get("sort"));
  const parameters = withChanges(selectionOf(query), {
    died_from: momentOf(query.get("died_from")),
    died_to: momentOf(query.get("died_to")),
    sort,
    offset: (page - 1) * PAGE,
    limit: PAGE,
  });
  const searching = Boolean(query.get("text"));
  const poll = usePoll(
    (signal) => getLetters(connection, queue, parameters, signal),
    me.refresh_seconds,
    `${connection}/${queue}?${parameters}`,
  );
  const letters = poll.data;
  const address = { connection, queue };
  const to = (changed) => lettersAddress(connection, queue, changed);
  return html`
    <${QueueHead} ...${address} poll=${head} tab=${select.parked ? "parked" : "dead"} />
    <${PollError} poll=${poll} />
    <div class="toolbar">
      <${Finder} query=${query} to=${to} />
      <${TimeRange} query=${query} to=${to} />
    </div>
    <${Filter} query=${query} to=${to} />
    ${!letters && !poll.error && html`<${Loading} what="letters" rows=${8} />`}
    ${letters && html`<${ScanNote} scan=${letters.scan} reload=${poll.reload} />`}
    ${searching && html`<${SearchResults} key=${query.toString()} ...${{ ...address, query, columns: columnsFor({ ...address, query }) }} />`}
    ${
      letters &&
      !searching &&
      !firstScan(letters.scan) &&
      (sizeOf(letters.matching)
        ? html`<${Page} ...${{ ...address, letters, select, query, page, sort, to }} />`
        : html`<${Empty} title="No letter matches">
            They were redriven, or the filter is too narrow. See
            <a href=${groupsAddress(connection, queue, select.parked ? { parked: "true" } : {})}>all of the queue's</a>.
          <//>`)
    }
  `;
}

/** @returns {import("../table.js").Column[]} */
export function columnsFor({ connection, queue, query }) {
  return [
    {
      key: "job", label: "Job", head: true, sortable: true,
      cell: (letter) => html`<${JobName} letter=${letter} to=${letterAddress(connection, queue, letter.sequence, query)} />`,
    },
    { key: "reason", label: "Reason", cell: (letter) => html`<${Reason} reason=${letter.reason} />` },
    { key: "error", label: "Error", wide: true, cell: (letter) => html`<${LetterError} letter=${letter} />` },
    { key: "subject", label: "Subject", wide: true, cell: (letter) => html`<code class="long" title=${letter.subject}>${letter.subject}</code>` },
    { key: "origin", label: "Published by", cell: (letter) => html`<span class="long"><${Origin} origin=${letter.origin} known=${letter.origin_known} /></span>` },
    { key: "deliveries", label: "Tries", numeric: true, hint: "Deliveries; redrives before in brackets", cell: tries },
    { key: "died", label: "Died", sortable: true, cell: (letter) => html`<${Ago} time=${letter.died_at} />` },
  ];
}

/** @param {{connection: string, queue: string, letters: LetterPage, select: object, query: URLSearchParams, page: number, sort: string, to: (query: URLSearchParams) => string}} props */
function Page({ connection, queue, letters, select, query, page, sort, to }) {
  const chosen = new Set((query.get("chosen") ?? "").split(",").map(Number).filter((number) => Number.isSafeInteger(number) && number > 0));
  const pages = Math.max(page, Math.ceil(sizeOf(letters.matching) / PAGE));
  const choose = (numbers) => go(to(withChanges(query, { chosen: [...numbers].sort((a, b) => a - b).join(",") })));
  const toggle = (number) => choose(chosen.has(number) ? [...chosen].filter((item) => item !== number) : [...chosen, number]);
  const shown = letters.letters.map((letter) => letter.sequence);
  const all = shown.length > 0 && shown.every((number) => chosen.has(number));
  const choosing = {
    key: "choose",
    label: html`<input type="checkbox" aria-label="Choose all letters of this page" checked=${all}
      onChange=${() => choose(all ? [...chosen].filter((number) => !shown.includes(number)) : new Set([...chosen, ...shown]))} />`,
    cell: (letter) => html`<input type="checkbox" aria-label=${`Choose letter ${letter.sequence}`} checked=${chosen.has(letter.sequence)}
      onChange=${() => toggle(letter.sequence)} />`,
  };
  const onSort = (key) => go(to(withChanges(query, { sort: sort === SORTS[key] ? `-${SORTS[key]}` : SORTS[key], page: null })));
  const sorted = Object.keys(SORTS).find((key) => SORTS[key] === sort.replace("-", "")) ?? "job";
  // A run's configuration has no times of death: it would take more letters than are shown.
  const ranged = query.get("died_from") || query.get("died_to");
  const me = useMe();
  const actions = [...(select.parked ? ["redrive", "discard"] : ["redrive", "park", "discard"]), ...(me.payloads ? ["edit"] : [])];
  const [acting, what] = chosen.size
    ? [{ sequences: [...chosen], ...(select.parked ? { parked: true } : {}) }, `${counted(chosen.size, "chosen letter")}`]
    : [ranged ? null : select, `all ${counted(letters.matching.value, "matching letter")}`];
  return html`
    <div class="toolbar spread">
      <p class="number">
        <strong><${Shown} of=${letters.matching} show=${exact} /></strong>
        ${` ${letters.matching.value === 1 ? "letter matches" : "letters match"}`}
        ${
          chosen.size > 0 &&
          html` <span class="aside">${exact(chosen.size)} chosen</span>
            <button type="button" class="quiet" onClick=${() => choose([])}>Choose none</button>`
        }
      </p>
      <${ActionButtons} ...${{ connection, queue, select: acting }} actions=${actions} what=${what} main=${true}
        none="A range of times can't be acted on: choose rows, or drop the range." />
    </div>
    <div class="panel letters"><${Table} caption="Letters" columns=${[choosing, ...columnsFor({ connection, queue, query })]} rows=${letters.letters}
      rowKey=${(letter) => letter.sequence} sort=${{ key: sorted, down: sort.startsWith("-") }} onSort=${onSort} /></div>
    ${letters.gone > 0 && html`<p class="hint">${counted(letters.gone, "letter")} of this page ended since the scan.</p>`}
    <nav class="pages" aria-label="Pages">
      <${Step} label="Previous" to=${page > 1 && to(withChanges(query, { page: page > 2 ? page - 1 : null }))} />
      <span class="hint">Page ${exact(page)} of ${exact(pages)}</span>
      <${Step} label="Next" to=${letters.next_offset != null && to(withChanges(query, { page: page + 1 }))} />
    </nav>
  `;
}

const Step = ({ label, to }) =>
  html`<button type="button" disabled=${!to} onClick=${() => to && go(to)}>${label}</button>`;

const tries = (letter) => `${exact(letter.deliveries)}${letter.redrives ? ` (${letter.redrives})` : ""}`;

/** @param {{letter: LetterLine}} props */
function LetterError({ letter }) {
  const name = letter.error_class?.split(".").at(-1);
  return html`<span class="fault">
    ${name && html`<span class="error" title=${letter.error_class}>${name}</span>`}
    ${letter.error_message && html`<span class="message" title=${letter.error_message}>${shortened(letter.error_message, SHOWN)}</span>`}
    ${!name && !letter.error_message && html`<span class="aside">no error was recorded</span>`}
  </span>`;
}
