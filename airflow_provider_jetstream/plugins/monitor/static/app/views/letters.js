/** Dead letters in pages by sequence, so that a million of them cost no more than fifty. */

import { getLetters } from "../api.js";
import { ActionButtons } from "../actions.js";
import { counted, exact } from "../format.js";
import { html, useEffect, useState } from "../html.js";
import { Ago, Empty, Loading, PollError } from "../components.js";
import { usePoll } from "../polling.js";
import { groupsAddress, letterAddress, lettersAddress } from "../routing.js";
import { asSelect, selectionOf } from "../selection.js";
import { useMe } from "../session.js";
import { Table } from "../table.js";
import { Reason } from "./groups.js";
import { Filter, ScanNote, firstScan } from "./filter.js";
import { QueueHead, useQueue } from "./queue_head.js";
import { Origin, jobName } from "./origin.js";

const PAGE = 50;

/** The letters that match a filter. */
export function LettersView({ connection, queue, query }) {
  const me = useMe();
  const head = useQueue(connection, queue);
  const select = asSelect(query);
  const selection = selectionOf(query);
  const [starts, setStarts] = useState([0]);
  useEffect(() => setStarts([0]), [selection.toString()]);
  const after = starts.at(-1);
  const parameters = new URLSearchParams([...selection, ["after", after], ["limit", PAGE]]);
  const poll = usePoll(
    (signal) => getLetters(connection, queue, parameters, signal),
    me.refresh_seconds,
    `${connection}/${queue}?${parameters}`,
  );
  const page = poll.data;
  const address = { connection, queue };
  return html`
    <${QueueHead} ...${address} poll=${head} tab=${select.parked ? "parked" : "dead"} />
    <${PollError} poll=${poll} />
    <${Filter} query=${query} to=${(other) => lettersAddress(connection, queue, other)} />
    ${!page && !poll.error && html`<${Loading} what="letters" rows=${8} />`}
    ${
      page &&
      html`
        <${ScanNote} scan=${page.scan} reload=${poll.reload} />
        ${
          !firstScan(page.scan) &&
          (page.matching
            ? html`<${Page} ...${{ ...address, page, select, selection, starts, setStarts }} />`
            : html`<${Empty} title="No letter matches">
                They were redriven, or the filter is too narrow. See
                <a href=${groupsAddress(connection, queue, select.parked ? { parked: "true" } : {})}>all of the queue's</a>.
              <//>`)
        }
      `
    }
  `;
}

function Page({ connection, queue, page, select, selection, starts, setStarts }) {
  const columns = [
    {
      key: "job", label: "Job", head: true,
      cell: (letter) => html`<a class="name" title=${letter.job_id}
        href=${letterAddress(connection, queue, letter.sequence, selection)}>${jobName(letter)}</a>
        <span class="aside">seq ${letter.sequence}</span>`,
    },
    { key: "reason", label: "Reason", cell: (letter) => html`<${Reason} reason=${letter.reason} />` },
    { key: "error", label: "Error", wide: true, cell: (letter) => html`<${LetterError} letter=${letter} />` },
    { key: "subject", label: "Subject", wide: true, cell: (letter) => html`<code>${letter.subject}</code>` },
    { key: "origin", label: "Published by", cell: (letter) => html`<${Origin} origin=${letter.origin} />` },
    { key: "deliveries", label: "Tries", numeric: true, hint: "Deliveries; redrives before in brackets", cell: tries },
    { key: "died", label: "Died", cell: (letter) => html`<${Ago} time=${letter.died_at} />` },
  ];
  const number = starts.length;
  return html`
    <div class="toolbar spread">
      <p class="number"><strong>${exact(page.matching)}</strong> ${page.matching === 1 ? "letter matches" : "letters match"}</p>
      <${ActionButtons} ...${{ connection, queue, select }} actions=${select.parked ? ["redrive"] : ["redrive", "park"]}
        what=${`all ${counted(page.matching, "matching letter")}`} main=${true} />
    </div>
    <div class="panel"><${Table} caption="Letters" columns=${columns} rows=${page.letters} rowKey=${(letter) => letter.sequence} /></div>
    ${page.gone > 0 && html`<p class="hint">${counted(page.gone, "letter")} of this page ended since the scan.</p>`}
    <nav class="pages" aria-label="Pages">
      <button type="button" disabled=${number === 1} onClick=${() => setStarts(starts.slice(0, -1))}>Previous</button>
      <span class="hint">Page ${number} of ${exact(Math.max(number, Math.ceil(page.matching / PAGE)))}</span>
      <button type="button" disabled=${page.next_after == null} onClick=${() => setStarts([...starts, page.next_after])}>Next</button>
    </nav>
  `;
}

const tries = (letter) => `${exact(letter.deliveries)}${letter.redrives ? ` (${letter.redrives})` : ""}`;

function LetterError({ letter }) {
  const name = letter.error_class?.split(".").at(-1);
  return html`<span class="fault">
    ${name && html`<span class="error" title=${letter.error_class}>${name}</span>`}
    ${letter.error_message && html`<span class="message" title=${letter.error_message}>${letter.error_message}</span>`}
    ${!name && !letter.error_message && html`<span class="aside">no error was recorded</span>`}
  </span>`;
}
