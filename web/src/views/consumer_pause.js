/** Pausing a consumer, and resuming it. */

import { pauseConsumer, resumeConsumer } from "../api.js";
import { clock, duration } from "../format.js";
import { html, useState } from "../html.js";
import { Failure, Modal } from "../components.js";
import { useMe } from "../session.js";

/** @import { ConsumerNumbers } from "../api_types" */
/** @import { ApiError } from "../api.js" */

const CHOICES = [300, 900, 3600, 4 * 3600, 24 * 3600];

/** @param {{connection: string, queue: string, consumer: ConsumerNumbers, most: number, reload: () => void}} props */
export function ConsumerButtons({ connection, queue, consumer, most, reload }) {
  const me = useMe();
  const [open, setOpen] = useState(false);
  if (!me.may_act) return null;
  if (!most && !consumer.paused) return html`<span class="hint" title="Pauses need nats-server 2.11">no pauses</span>`;
  const act = consumer.paused ? "Resume" : "Pause";
  return html`
    ${consumer.paused_until && html`<span class="hint">until ${clock(consumer.paused_until)}</span> `}
    <button type="button" aria-label=${`${act} ${consumer.name}`} onClick=${() => setOpen(true)}>${act}…</button>
    ${open && html`<${PauseDialog} ...${{ connection, queue, consumer, most, reload, close: () => setOpen(false) }} />`}
  `;
}

function PauseDialog({ connection, queue, consumer, most, reload, close }) {
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  const [sending, setSending] = useState(false);
  const { name, paused } = consumer;
  const confirm = async (event) => {
    event.preventDefault();
    const { why, seconds } = /** @type {Record<string, string>} */ (Object.fromEntries(new FormData(event.currentTarget)));
    setSending(true);
    try {
      const reason = why.trim() || null;
      if (paused) await resumeConsumer(connection, queue, name, reason);
      else await pauseConsumer(connection, queue, name, Number(seconds), reason);
      reload();
      close();
    } catch (problem) {
      setError(problem);
      setSending(false);
    }
  };
  const choices = CHOICES.filter((seconds) => seconds <= most);
  return html`
    <${Modal} title=${paused ? `Resume ${name}` : `Pause ${name}`} close=${close}>
      <form onSubmit=${confirm}>
        <p>
          ${
            paused
              ? "Its workers get jobs again."
              : "The server delivers none of its jobs until then. Jobs in flight go on, and their ack wait runs."
          }
        </p>
        ${
          !paused &&
          html`<label>For
            <select name="seconds">
              ${(choices.length ? choices : [most]).map((seconds) => html`<option key=${seconds} value=${seconds}>${duration(seconds)}</option>`)}
            </select>
          </label>`
        }
        <label>Why <span class="hint">recorded in the audit, with your name</span>
          <input name="why" autocomplete="off" maxlength="200" />
        </label>
        ${error && html`<${Failure} error=${error} reload=${() => setError(null)} />`}
        <div class="buttons">
          <button type="button" onClick=${close}>Cancel</button>
          <button type="submit" class="primary" disabled=${sending}>${paused ? "Resume" : "Pause"}</button>
        </div>
      </form>
    <//>
  `;
}
