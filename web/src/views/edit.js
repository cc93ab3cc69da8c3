/** Changing one letter and redriving it: the difference is shown before anything is stored. */

import { editLetter } from "../api.js";
import { bytes } from "../format.js";
import { html, useState } from "../html.js";
import { Failure, Modal, Notice } from "../components.js";
import { storedJobAddress } from "../routing.js";

/** @import { EditResult, LetterDetail } from "../api_types" */
/** @import { ApiError } from "../api.js" */

/**
 * @param {LetterDetail} detail
 * @returns {string | null} why the letter can't be edited here
 */
export function notEditable({ payload }) {
  if (!payload) return "Your role doesn't see its body.";
  if (payload.truncated) return "Its body is too large to be edited here.";
  // A form makes one kind of all ends of lines.
  if (payload.raw != null && asStored(asInForm(payload.raw), payload.raw) !== payload.raw) {
    return "Its lines end in several ways, which a form would change: download it.";
  }
  return null;
}

/** @param {string} text @returns {string} as a form's field returns it */
export const asInForm = (text) => text.replace(/\r\n?/g, "\n");

/** @param {string} text of a form's field @param {string} raw @returns {string} with ends of lines as in the stored body */
export const asStored = (text, raw) => (raw.includes("\r\n") ? text.replaceAll("\n", "\r\n") : text);

/** @param {{connection: string, queue: string, detail: LetterDetail, close: () => void, reload: () => void}} props */
export function EditDialog({ connection, queue, detail, close, reload }) {
  const { payload, letter } = detail;
  const raw = payload?.raw ?? null;
  const [body, setBody] = useState(raw);
  const [subject, setSubject] = useState(letter.subject);
  const [why, setWhy] = useState("");
  const [preview, setPreview] = useState(/** @type {EditResult | null} */ (null));
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  const [sending, setSending] = useState(false);
  const send = async (dryRun) => {
    setSending(true);
    setError(null);
    try {
      const result = await editLetter(connection, queue, letter.sequence, {
        sha256: payload?.sha256,
        body: body == null || raw == null || asStored(asInForm(body), raw) === raw ? null : asStored(asInForm(body), raw),
        subject: subject === letter.subject ? null : subject,
        why: why.trim() || null,
        dry_run: dryRun,
      });
      setPreview(result);
      if (!dryRun) reload();
    } catch (problem) {
      setError(problem);
    }
    setSending(false);
  };
  const change = (set) => (event) => {
    set(event.currentTarget.value);
    setPreview(null);
  };
  const done = preview?.redriven;
  return html`
    <${Modal} title=${`Edit and retry letter ${letter.sequence}`} close=${close} wide=${true}>
      <form onSubmit=${(event) => { event.preventDefault(); send(!preview); }}>
        ${
          raw == null
            ? html`<p class="hint">The body isn't text: its bytes stay as they are.</p>`
            : html`<label>Body <span class="hint">as it is stored; what you don't change stays byte for byte</span>
                <textarea name="body" rows="10" spellcheck="false" value=${body} readOnly=${Boolean(done)} onInput=${change(setBody)}></textarea>
              </label>`
        }
        <label>Subject <input name="subject" value=${subject} readOnly=${Boolean(done)} onInput=${change(setSubject)} /></label>
        <label>Why <span class="hint">recorded in the audit, with your name</span>
          <input name="why" maxlength="200" autocomplete="off" value=${why} onInput=${(event) => setWhy(event.currentTarget.value)} />
        </label>
        ${preview && html`<${Difference} result=${preview} />`}
        ${error && html`<${Failure} error=${error} reload=${() => send(true)} />`}
        ${
          done &&
          html`<${Notice} tone="good" title="Redriven with the change">
            It is <a href=${storedJobAddress(connection, queue, done)}>job ${done}</a> of ${queue} now.
          <//>`
        }
        <div class="buttons">
          <button type="button" onClick=${close}>${done ? "Close" : "Cancel"}</button>
          ${!done && html`<button type="submit" class="primary" disabled=${sending}>${preview ? "Redrive with this change" : "Show the difference"}</button>`}
        </div>
      </form>
    <//>
  `;
}

/** What an edit changes. @param {{result: EditResult}} props */
export function Difference({ result }) {
  const nothing = !result.diff && !result.headers.length && !result.subject;
  return html`
    <section aria-label="Difference">
      ${nothing && html`<p class="hint">Nothing differs: it would be redriven as it is.</p>`}
      <${Lines} diff=${result.diff} what="the body" />
      ${result.subject && html`<p>Subject: <code>${result.subject}</code></p>`}
      ${result.headers.map(
        ([name, before, after]) => html`<p key=${name}><code>${name}</code>: <del>${before ?? "none"}</del> <ins>${after ?? "none"}</ins></p>`,
      )}
      ${result.size_before !== result.size_after && html`<p class="hint">${bytes(result.size_before)} before, ${bytes(result.size_after)} after</p>`}
      ${result.warnings.map((warning) => html`<${Notice} key=${warning} tone="warn">${warning}<//>`)}
    </section>
  `;
}

/** The lines of a unified diff. @param {{diff: string, what: string}} props */
export function Lines({ diff, what }) {
  const lines = diff ? diff.replace(/\n$/, "").split("\n") : [];
  return (
    lines.length > 0 &&
    html`<pre class="diff" tabindex="0" role="region" aria-label=${`Difference of ${what}`}>${lines.map(
      (line, index) => html`<span key=${index} class=${kindOf(line)}>${line}${"\n"}</span>`,
    )}</pre>`
  );
}

/** @param {string} line of a unified diff */
export function kindOf(line) {
  if (line.startsWith("+++") || line.startsWith("---") || line.startsWith("@@")) return "place";
  if (line.startsWith("+")) return "added";
  return line.startsWith("-") ? "removed" : "";
}
