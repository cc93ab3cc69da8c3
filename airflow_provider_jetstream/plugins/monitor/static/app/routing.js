/** Addresses inside the page. They stand behind the `#`, so that they work in an iframe and under any path. */

import { host, mirrorAddress } from "./airflow.js";
import { useEffect, useState } from "./html.js";

const part = encodeURIComponent;

/** @param {URLSearchParams | Record<string, string>} [query] */
function address(path, query) {
  const text = new URLSearchParams(query).toString();
  return `#${path}${text ? `?${text}` : ""}`;
}

export const queuesAddress = () => "#/queues";
export const queueAddress = (connection, queue) => `#/queues/${part(connection)}/${part(queue)}`;
export const groupsAddress = (connection, queue, query) =>
  address(`/queues/${part(connection)}/${part(queue)}/dead`, query);
export const lettersAddress = (connection, queue, query) =>
  address(`/queues/${part(connection)}/${part(queue)}/letters`, query);
export const letterAddress = (connection, queue, sequence, query) =>
  address(`/queues/${part(connection)}/${part(queue)}/letters/${part(sequence)}`, query);
export const jobsAddress = (query) => address("/jobs", query);

/**
 * @typedef {object} Route
 * @property {"card" | "queues" | "queue" | "dead" | "letters" | "letter" | "jobs"} view
 * @property {string} [connection]
 * @property {string} [queue]
 * @property {string} [sequence]
 * @property {URLSearchParams} query
 */

/** @returns {Route} what an address is about */
export function parse(hash) {
  const [path, text] = hash.replace(/^#/, "").split("?", 2);
  const query = new URLSearchParams(text ?? "");
  let parts;
  try {
    parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    parts = [];
  }
  const [first, connection, queue, tab, sequence] = parts;
  if (first === "jobs") return { view: "jobs", query };
  if (first === "card") return { view: "card", query };
  if (first !== "queues" || !queue) return { view: "queues", query };
  const at = { connection, queue, query };
  if (tab === "letters" && sequence) return { view: "letter", sequence, ...at };
  if (tab === "letters" || tab === "dead") return { view: tab, ...at };
  return { view: "queue", ...at };
}

/** What the page was opened for: a run's or a task's view, or a link that a task has left. */
function opened() {
  const own = new URLSearchParams(window.location.search);
  const given = own.size ? own : new URLSearchParams(host?.location.search ?? "");
  const [connection, queue, view] = ["connection", "queue", "view"].map((name) => given.get(name));
  const who = new URLSearchParams();
  for (const name of ["dag_id", "run_id", "task_id", "map_index"]) {
    const value = given.get(name);
    // Airflow leaves what it has no value for as it is.
    const absent = !value || /^\{.*\}$/.test(value) || (name === "map_index" && value === "-1");
    if (!absent) who.set(name, value);
  }
  if (view === "letters" && connection && queue) {
    who.delete("map_index");
    return lettersAddress(connection, queue, who);
  }
  if (view === "jobs" || (who.size && !queue)) return jobsAddress(who);
  return connection && queue ? queueAddress(connection, queue) : queuesAddress();
}

/** Give the page an address if it has none yet. */
export function startRouting() {
  if (!window.location.hash) history.replaceState(null, "", opened());
}

/** Go somewhere else in the page. */
export function go(hash) {
  window.location.hash = hash;
}

/** @returns {Route} where the page is, drawn again when that changes */
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
