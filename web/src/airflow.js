/** Addresses of Airflow's own pages, and navigation to them from inside its iframe. */

import { html } from "./html.js";
import { base, host, isEmbedded } from "./place.js";

const encode = encodeURIComponent;

const airflow = new URL("../", base).href;

/** @returns {string} the address of a DAG */
export const dagAddress = (dagId) => `${airflow}dags/${encode(dagId)}`;

/** @returns {string} the address of a DAG run */
export const runAddress = (dagId, runId) => `${dagAddress(dagId)}/runs/${encode(runId)}`;

/** @returns {string} the address of a task instance */
export function taskAddress({ dag_id: dagId, run_id: runId, task_id: taskId, map_index: mapIndex }) {
  const address = `${runAddress(dagId, runId)}/tasks/${encode(taskId)}`;
  return mapIndex >= 0 ? `${address}/mapped/${mapIndex}` : address;
}

/** The address of the page inside Airflow. */
export const pageAddress = `${airflow}plugin/jetstream`;

/** @returns {string} the address of Airflow's login */
export const loginAddress = `${airflow}auth/login`;

/** Open an address of Airflow by its own router, since no link can leave Airflow's iframe. */
function open(frame, event, to) {
  if (event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  frame.history.pushState({}, "", to);
  frame.dispatchEvent(new frame.PopStateEvent("popstate", { state: {} }));
}

/** Follow the links of a view in Airflow's own page without loading Airflow again. @param {MouseEvent} event */
export function followInAirflow(event) {
  const link = /** @type {Element} */ (event.target).closest("a[href]");
  if (link instanceof HTMLAnchorElement && link.href.startsWith(airflow)) open(window, event, link.href);
}

/** A link to a page of Airflow's own. */
export function AirflowLink({ to, children, ...rest }) {
  const follow = host && !isEmbedded() ? (event) => open(host, event, event.currentTarget.href) : undefined;
  return html`<a href=${to} onClick=${follow} ...${rest}>${children}</a>`;
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
