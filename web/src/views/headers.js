/** The headers of a job. */

import { html } from "../html.js";
import { Table } from "../table.js";

const columns = [
  { key: "name", label: "Name", head: true, cell: ([name]) => html`<code>${name}</code>` },
  { key: "value", label: "Value", cell: ([, value]) => html`<code class="breaks">${value}</code>` },
];

/** @param {{headers: [string, string][]}} props */
export const Headers = ({ headers }) =>
  headers.length
    ? html`<div class="panel"><${Table} caption="Headers" columns=${columns}
        rows=${headers} rowKey=${(pair) => `${headers.indexOf(pair)}`} /></div>`
    : html`<p class="hint panel padded">None.</p>`;
