/** Addresses of Airflow's own pages, and navigation to them from inside its iframe. */

import { html } from "./html.js";

/** The window that shows Airflow, if the page is inside it. */
export const host = (() => {
  try {
    return window.parent !== window && window.parent.document ? window.parent : null;
  } catch {
    return null;
  }
})();

const encode = encodeURIComponent;

/** @returns {string} the address of a DAG, relative to the page */
export const dagAddress = (dagId) => `../dags/${encode(dagId)}`;

/** @returns {string} the address of a DAG run */
export const runAddress = (dagId, runId) => `${dagAddress(dagId)}/runs/${encode(runId)}`;

/** @returns {string} the address of a task instance */
export function taskAddress({ dag_id: dagId, run_id: runId, task_id: taskId, map_index: mapIndex }) {
  const address = `${runAddress(dagId, runId)}/tasks/${encode(taskId)}`;
  return mapIndex >= 0 ? `${address}/mapped/${mapIndex}` : address;
}

/** The address of the page inside Airflow. */
export const pageAddress = "../plugin/jetstream";

/** @returns {string} the address of Airflow's login */
export const loginAddress = "../auth/login";

/** Navigate by Airflow's own router, since no link can leave Airflow's iframe. */
function navigate(event) {
  if (!host || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  host.history.pushState({}, "", event.currentTarget.href);
  host.dispatchEvent(new host.PopStateEvent("popstate", { state: {} }));
}

/** A link to a page of Airflow's own. */
export function AirflowLink({ to, children, ...rest }) {
  return html`<a href=${to} onClick=${navigate} ...${rest}>${children}</a>`;
}

/**
 * Update the copy of the page's address in Airflow's own address, so that reloading and sharing it work.
 *
 * Airflow 3.3 copies the iframe's address when the frame has loaded, but not when its hash changes.
 */
export function mirrorAddress() {
  if (!host) return;
  const mirrored = /^(.*\/plugin\/[^/]+)\/.+$/.exec(host.location.pathname);
  if (!mirrored || !host.location.pathname.endsWith(window.location.pathname)) return;
  const { pathname, search, hash } = window.location;
  const root = host.location.pathname.slice(0, -pathname.length);
  host.history.replaceState(host.history.state, "", `${root}${pathname}${search}${hash}`);
}
