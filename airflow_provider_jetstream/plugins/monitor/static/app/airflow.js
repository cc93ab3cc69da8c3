/** Airflow around the page: its addresses, and how to get there from inside its iframe. */

import { html } from "./html.js";

/** The window that shows Airflow, if the page is inside it. */
export const host = (() => {
  try {
    return window.parent !== window && window.parent.document ? window.parent : null;
  } catch {
    return null;
  }
})();

const part = encodeURIComponent;

/** @returns {string} where Airflow shows a DAG, relative to the page */
export const dagAddress = (dagId) => `../dags/${part(dagId)}`;

/** @returns {string} where Airflow shows a run */
export const runAddress = (dagId, runId) => `${dagAddress(dagId)}/runs/${part(runId)}`;

/** @returns {string} where Airflow shows a task instance */
export function taskAddress({ dag_id: dagId, run_id: runId, task_id: taskId, map_index: mapIndex }) {
  const address = `${runAddress(dagId, runId)}/tasks/${part(taskId)}`;
  return mapIndex >= 0 ? `${address}/mapped/${mapIndex}` : address;
}

/** Where Airflow shows the page. */
export const pageAddress = "../plugin/jetstream";

/** @returns {string} where Airflow has people log in */
export const loginAddress = "../auth/login";

/** Airflow's iframe lets no link leave it, so its router is told instead. */
function leave(event) {
  if (!host || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  host.history.pushState({}, "", event.currentTarget.href);
  host.dispatchEvent(new host.PopStateEvent("popstate", { state: {} }));
}

/** A link to a page of Airflow's own. */
export function AirflowLink({ to, children, ...rest }) {
  return html`<a href=${to} onClick=${leave} ...${rest}>${children}</a>`;
}

/**
 * Keep the address that Airflow mirrors in its own up to date, so that reloading and sharing it work.
 *
 * Airflow 3.3 writes the iframe's address into its own when the frame has loaded, and not when its hash changes.
 */
export function mirrorAddress() {
  if (!host) return;
  const mirrored = /^(.*\/plugin\/[^/]+)\/.+$/.exec(host.location.pathname);
  if (!mirrored || !host.location.pathname.endsWith(window.location.pathname)) return;
  const { pathname, search, hash } = window.location;
  const root = host.location.pathname.slice(0, -pathname.length);
  host.history.replaceState(host.history.state, "", `${root}${pathname}${search}${hash}`);
}
