/** Addresses inside the page: in the hash, so that they work in an iframe and under any path. */

import { mirrorAddress, pageAddress } from "./airflow.js";
import { useEffect, useState } from "./html.js";
import { host, isEmbedded } from "./place.js";

const encode = encodeURIComponent;

/**
 * @param {string} path
 * @param {URLSearchParams | Record<string, string>} [query]
 */
function address(path, query) {
  const text = new URLSearchParams(query).toString();
  const inside = `${path}${text ? `?${text}` : ""}`;
  return isEmbedded() ? `${pageAddress}?address=${encode(inside)}` : `#${inside}`;
}

/** @param {URLSearchParams | Record<string, string>} [query] */
export const queuesAddress = (query) => address("/queues", query);
export const queueAddress = (connection, queue) => address(`/queues/${encode(connection)}/${encode(queue)}`);
export const groupsAddress = (connection, queue, query) =>
  address(`/queues/${encode(connection)}/${encode(queue)}/dead`, query);
export const lettersAddress = (connection, queue, query) =>
  address(`/queues/${encode(connection)}/${encode(queue)}/letters`, query);
export const letterAddress = (connection, queue, sequence, query) =>
  address(`/queues/${encode(connection)}/${encode(queue)}/letters/${encode(sequence)}`, query);
export const storedJobsAddress = (connection, queue, query) =>
  address(`/queues/${encode(connection)}/${encode(queue)}/jobs`, query);
export const storedJobAddress = (connection, queue, sequence, query) =>
  address(`/queues/${encode(connection)}/${encode(queue)}/jobs/${encode(sequence)}`, query);
export const redrivesAddress = (connection, queue) => address(`/queues/${encode(connection)}/${encode(queue)}/redrives`);
export const redriveAddress = (connection, queue, id) =>
  address(`/queues/${encode(connection)}/${encode(queue)}/redrives/${encode(id)}`);
export const jobsAddress = (query) => address("/jobs", query);
/** @param {string} dagId @returns {string} the address of the dead letters of a DAG */
export const dagLettersAddress = (dagId) => address("/dag", { dag_id: dagId });

/**
 * @typedef {object} Route
 * @property {"card" | "queues" | "queue" | "dead" | "letters" | "letter" | "stored" | "job" | "redrives" | "redrive" | "jobs" | "dag"} view
 * @property {string} [connection]
 * @property {string} [queue]
 * @property {string} [sequence] of a letter or a stored job
 * @property {string} [id] of a redrive
 * @property {URLSearchParams} query
 */

/** @param {string} hash @returns {Route} the route of an address */
export function parse(hash) {
  const [path, text] = hash.replace(/^#/, "").split("?", 2);
  const query = new URLSearchParams(text ?? "");
  let segments;
  try {
    segments = path.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    segments = [];
  }
  const [first, connection, queue, tab, sequence] = segments;
  if (first === "jobs") return { view: "jobs", query };
  if (first === "dag") return { view: "dag", query };
  if (first === "card") return { view: "card", query };
  if (first !== "queues" || !queue) return { view: "queues", query };
  const at = { connection, queue, query };
  if (tab === "letters" && sequence) return { view: "letter", sequence, ...at };
  if (tab === "jobs") return sequence ? { view: "job", sequence, ...at } : { view: "stored", ...at };
  if (tab === "redrives") return sequence ? { view: "redrive", id: sequence, ...at } : { view: "redrives", ...at };
  if (tab === "letters" || tab === "dead") return { view: tab, ...at };
  return { view: "queue", ...at };
}

/** @returns {string} the first address, from the query of a view of a run or task, or of a task's link */
function initialAddress() {
  const own = new URLSearchParams(window.location.search);
  const query = own.size ? own : new URLSearchParams(host?.location.search ?? "");
  const inside = query.get("address");
  if (inside?.startsWith("/")) return `#${inside}`;
  const [connection, queue, view] = ["connection", "queue", "view"].map((name) => query.get(name));
  const origin = new URLSearchParams();
  for (const name of ["dag_id", "run_id", "task_id", "map_index"]) {
    const value = query.get(name);
    // Airflow leaves placeholders without a value unchanged.
    const absent = !value || /^\{.*\}$/.test(value) || (name === "map_index" && value === "-1");
    if (!absent) origin.set(name, value);
  }
  if (view === "letters" && connection && queue) {
    origin.delete("map_index");
    return lettersAddress(connection, queue, origin);
  }
  if (view === "jobs" || (origin.size && !queue)) return jobsAddress(origin);
  return connection && queue ? queueAddress(connection, queue) : queuesAddress();
}

/** Set the first address if there is none. */
export function startRouting() {
  if (!window.location.hash) history.replaceState(null, "", initialAddress());
}

/** The only address where the page is a view of Airflow's own. @type {string | null} */
let only = null;
const listeners = new Set();

/** Show one address, whatever the browser's is. @param {string} hash */
export function showOnly(hash) {
  only = hash;
}

const currentHash = () => only ?? window.location.hash;

/** Navigate to an address of the page. @param {string} hash */
export function go(hash) {
  if (only === null) window.location.hash = hash;
  else window.location.assign(hash);
}

/** Replace the query of the current address, without a step back to the former one. @param {URLSearchParams} query */
export function replaceQuery(query) {
  const [path] = currentHash().split("?", 1);
  const text = query.toString();
  const hash = `${path}${text ? `?${text}` : ""}`;
  if (only === null) history.replaceState(history.state, "", hash);
  else only = hash;
  for (const listener of listeners) listener();
}

/**
 * @param {URLSearchParams} query
 * @param {Record<string, string | number | null | undefined>} changes a name without a value is removed
 * @returns {URLSearchParams} a copy with changes
 */
export function withChanges(query, changes) {
  const changed = new URLSearchParams(query);
  for (const [name, value] of Object.entries(changes)) {
    if (value == null || value === "") changed.delete(name);
    else changed.set(name, String(value));
  }
  return changed;
}

/** @returns {Route} the current route; renders again when it changes */
export function useRoute() {
  const [route, setRoute] = useState(() => parse(currentHash()));
  useEffect(() => {
    const changed = () => {
      setRoute(parse(currentHash()));
      mirrorAddress();
    };
    listeners.add(changed);
    window.addEventListener("hashchange", changed);
    return () => {
      listeners.delete(changed);
      window.removeEventListener("hashchange", changed);
    };
  }, []);
  return route;
}
