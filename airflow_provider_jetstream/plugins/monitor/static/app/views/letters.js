/** Dead letters one by one, in pages by sequence, so that a million of them cost no more than fifty. */

import { getLetters } from "../api.js";
import { Act } from "../acting.js";
import { counted, exact } from "../format.js";
import { html, useEffect, useState } from "../html.js";
import { Ago, Empty, Loading, Stale } from "../parts.js";
import { usePoll } from "../polling.js";
import { groupsAddress, letterAddress, lettersAddress } from "../routing.js";
import { asSelect, selectionOf } from "../selection.js";
import { useMe } from "../session.js";
import { Table } from "../table.js";
import { Reason } from "./dead.js";
import { Filter, ScanNote, firstScan } from "./filter.js";
import { QueueHead, useQueue } from "./head.js";
import { Origin, jobName } from "./origin.js";

const PAGE = 50;

/** The letters that a filter means. */
export function LettersView({ connection, queue, query }) {
  const me = useMe();
  const head = useQueue(connection, queue);
  const select = asSelect(query);
  const selection = selectionOf(query);
  const [trail, setTrail] = useState([0]);
  useEffect(() => setTrail([0]), [selection.toString()]);
  const after = trail.at(-1);
  const asked = new URLSearchParams([...selection, ["after", after], ["limit", PAGE]]);
  const poll = usePoll(
    (signal) => getLetters(connection, queue, asked, signal),
    me.refresh_seconds,
    `${connection}/${queue}?${asked}`,
  );
  const found = poll.data;
  const at = { connection, queue };
  return html`
    <${QueueHead} ...${at} poll=${head} tab=${select.parked ? "parked" : "dead"} />
    <${Stale} poll=${poll} />
    <${Filter} query=${query} to=${(other) => lettersAddress(connection, queue, other)} />
    ${!found && !poll.error && html`<${Loading} what="letters" rows=${8} />`}
    ${
      found &&
      html`
        <${ScanNote} scan=${found.scan} reload=${poll.reload} />
        ${
          !firstScan(found.scan) &&
          (found.matching
            ? html`<${Page} ...${{ ...at, found, select, selection, trail, setTrail }} />`
            : html`<${Empty} title="No letter matches">
                They were redriven, or the filter is too narrow. See
                <a href=${groupsAddress(connection, queue, select.parked ? { parked: "true" } : {})}>all of the queue's</a>.
              <//>`)
        }
      `
    }
  `;
}

function Page({ connection, queue, found, select, selection, trail, setTrail }) {
  const columns = [
    {
      key: "job", label: "Job", head: true,
      cell: (letter) => html`<a class="name" title=${letter.job_id}
        href=${letterAddress(connection, queue, letter.sequence, selection)}>${jobName(letter)}</a>
        <span class="aside">seq ${letter.sequence}</span>`,
    },
    { key: "reason", label: "Reason", cell: (letter) => html`<${Reason} reason=${letter.reason} />` },
    { key: "error", label: "Error", wide: true, cell: (letter) => html`<${Fault} letter=${letter} />` },
    { key: "subject", label: "Subject", wide: true, cell: (letter) => html`<code>${letter.subject}</code>` },
    { key: "origin", label: "Published by", cell: (letter) => html`<${Origin} origin=${letter.origin} />` },
    { key: "deliveries", label: "Tries", numeric: true, hint: "Deliveries; redrives before in brackets", cell: tries },
    { key: "died", label: "Died", cell: (letter) => html`<${Ago} time=${letter.died_at} />` },
  ];
  const number = trail.length;
  return html`
    <div class="toolbar spread">
      <p class="number"><strong>${exact(found.matching)}</strong> ${found.matching === 1 ? "letter matches" : "letters match"}</p>
      <${Act} ...${{ connection, queue, select }} actions=${select.parked ? ["redrive"] : ["redrive", "park"]}
        what=${`all ${counted(found.matching, "matching letter")}`} main=${true} />
    </div>
    <div class="panel"><${Table} caption="Letters" columns=${columns} rows=${found.letters} rowKey=${(letter) => letter.sequence} /></div>
    ${found.gone > 0 && html`<p class="hint">${counted(found.gone, "letter")} of this page ended since the scan.</p>`}
    <nav class="pages" aria-label="Pages">
      <button type="button" disabled=${number === 1} onClick=${() => setTrail(trail.slice(0, -1))}>Previous</button>
      <span class="hint">Page ${number} of ${exact(Math.max(number, Math.ceil(found.matching / PAGE)))}</span>
      <button type="button" disabled=${found.next_after == null} onClick=${() => setTrail([...trail, found.next_after])}>Next</button>
    </nav>
  `;
}

const tries = (letter) => `${exact(letter.deliveries)}${letter.redrives ? ` (${letter.redrives})` : ""}`;

function Fault({ letter }) {
  const name = letter.error_class?.split(".").at(-1);
  return html`<span class="fault">
    ${name && html`<span class="error" title=${letter.error_class}>${name}</span>`}
    ${letter.error_message && html`<span class="message" title=${letter.error_message}>${letter.error_message}</span>`}
    ${!name && !letter.error_message && html`<span class="aside">nothing was told</span>`}
  </span>`;
}
