/** A body, first exactly as it is stored; its text is what is copied. */

import { bytes } from "../format.js";
import { html, useState } from "../html.js";
import { Badge, Copy, Notice } from "../components.js";

/** @import { Payload as Body } from "../api_types" */

const KINDS = { json: "JSON", text: "Text", binary: "Binary" };

/** @param {{payload: Body | null, whole?: string}} props `whole` is the address of the bytes as a file */
export function Payload({ payload, whole }) {
  const [indented, setIndented] = useState(false);
  if (!payload) {
    return html`<${Notice} tone="warn" title="Payloads are hidden from your role">Ask an administrator of Airflow.<//>`;
  }
  const stored = payload.raw ?? payload.hex ?? payload.text;
  const shown = indented && payload.parsed != null ? payload.parsed : stored;
  return html`
    <div class="panel payload">
      <div class="bar-top">
        <${Badge}>${KINDS[payload.kind] ?? payload.kind}<//>
        <span class="hint">${bytes(payload.size)}${payload.truncated ? ", only the beginning is shown" : ""}</span>
        ${
          payload.parsed != null &&
          html`<button type="button" aria-pressed=${indented} onClick=${() => setIndented(!indented)}
            title="The same text with line breaks. What is copied stays as it is stored.">Indented</button>`
        }
        ${whole && html`<a class="download" href=${whole} download>Download</a>`}
        ${payload.raw != null && !payload.truncated && html`<${Copy} text=${payload.raw} what="the payload" />`}
      </div>
      ${payload.notes.length > 0 && html`<ul class="notes padded" aria-label="Notes on the payload">${payload.notes.map((note) => html`<li key=${note}>${note}</li>`)}</ul>`}
      ${payload.size ? html`<pre tabindex="0" role="region" aria-label="Payload">${shown}</pre>` : html`<p class="hint padded">The body is empty.</p>`}
    </div>
  `;
}
