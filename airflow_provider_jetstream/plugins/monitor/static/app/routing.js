/** Addresses inside the page: in the hash, so that they work in an iframe and under any path. */

import { host, mirrorAddress } from "./airflow.js";
import { useEffect, useState } from "./html.js";

const encode = encodeURIComponent;

/** @param {URLSearchParams | Record<string, string>} [query] */
function address(path, query) {
  const text = new URLSearchParams(query).toString();
  return `#${path}${text ? `?${text}` : ""}`;
}

export const queuesAddress = () => "#/queues";
export const queueAddress = (connection, queue) => `#/queues/${encode(connection)}/${encode(queue)}`;
export const groupsAddress = (connection, queue, query) =>
  address(`/queues/${encode(connection)}/${encode(queue)}/dead`, query);
export const lettersAddress = (connection, queue, query) =>
  address(`/queues/${encode(connection)}/${encode(queue)}/letters`, query);
export const letterAddress = (connection, queue, sequence, query) =>
  address(`/queues/${encode(connection)}/${encode(queue)}/letters/${encode(sequence)}`, query);
export const jobsAddress = (query) => address("/jobs", query);

/**
 * @typedef {object} Route
 * @property {"card" | "queues" | "queue" | "dead" | "letters" | "letter" | "jobs"} view
 * @property {string} [connection]
 * @property {string} [queue]
 * @property {string} [sequence]
 * @property {URLSearchParams} query
 */

/** @returns {Route} the route of an address */
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
  if (first === "card") return { view: "card", query };
  if (first !== "queues" || !queue) return { view: "queues", query };
  const at = { connection, queue, query };
  if (tab === "letters" && sequence) return { view: "letter", sequence, ...at };
  if (tab === "letters" || tab === "dead") return { view: tab, ...at };
  return { view: "queue", ...at };
}

/** @returns {string} the first address, from the query of a view of a run or task, or of a task's link */
function initialAddress() {
  const own = new URLSearchParams(window.location.search);
  const query = own.size ? own : new URLSearchParams(host?.location.search ?? "");
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

/** Navigate to an address of the page. */
export function go(hash) {
  window.location.hash = hash;
}

/** @returns {Route} the current route; renders again when it changes */
export function useRoute() {
  const [route, setRoute] = useState(() => parse(window.location.hash));
  useEffect(() => {
    const changed = () => {
      setRoute(parse(window.location.hash));
      mirrorAddress();
    };
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return route;
}
