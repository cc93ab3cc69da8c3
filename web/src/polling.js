/** Polling: data is requested every few seconds, except while the page is hidden or the user has paused it. */

/** @import { ApiError } from "./api.js" */
import { useEffect, useState } from "./html.js";

/** Seconds until a failed request is repeated. */
const RETRY = 3;

let live = true;
const listeners = new Set();

/** @returns {boolean} whether the page refreshes automatically */
export const isLive = () => live;

/** Pause or resume refreshing. */
export function setLive(on) {
  live = on;
  for (const listener of listeners) listener();
}

/** What keeps new numbers from coming: a server that is away, a request that failed. @type {Set<object>} */
const troubles = new Set();
const watchers = new Set();

/** @returns {"live" | "paused" | "cut off"} whether new numbers come; renders again when that changes */
export function useLive() {
  const [, render] = useState(0);
  useEffect(() => {
    const changed = () => render((count) => count + 1);
    watchers.add(changed);
    const unsubscribe = subscribe(changed);
    return () => {
      watchers.delete(changed);
      unsubscribe();
    };
  }, []);
  if (!live) return "paused";
  return troubles.size ? "cut off" : "live";
}

/** Say that no new numbers come, for as long as the component is shown. @param {boolean} on */
export function useTrouble(on) {
  useEffect(() => {
    if (!on) return undefined;
    const trouble = {};
    const change = () => watchers.forEach((changed) => changed());
    troubles.add(trouble);
    change();
    return () => {
      troubles.delete(trouble);
      change();
    };
  }, [on]);
}

function subscribe(listener) {
  listeners.add(listener);
  document.addEventListener("visibilitychange", listener);
  return () => {
    listeners.delete(listener);
    document.removeEventListener("visibilitychange", listener);
  };
}

/**
 * Poll data. After a failed request the last data stays, together with the error.
 *
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} load requests it
 * @param {number} seconds between an answer and the next request
 * @param {string} key identifies the data; another key starts without data
 * @returns {{data?: T, error?: ApiError, at?: number, reload: () => void}}
 */
export function usePoll(load, seconds, key) {
  const [state, setState] = useState(/** @type {{key: string, data?: T, error?: ApiError, at?: number}} */ ({ key }));
  const [round, setRound] = useState(0);
  useEffect(() => {
    let timer;
    let controller;
    let ended = false;
    const poll = async () => {
      clearTimeout(timer);
      controller?.abort();
      const current = new AbortController();
      controller = current;
      let next;
      try {
        next = { key, data: await load(current.signal), error: undefined, at: Date.now() };
      } catch (error) {
        next = { key, error };
      }
      if (ended || current.signal.aborted) return;
      controller = undefined;
      setState((old) => (old.key === key ? { ...old, ...next } : next));
      const pause = next.error ? Math.min(seconds, RETRY) : seconds;
      if (live && !document.hidden) timer = setTimeout(poll, pause * 1000);
    };
    const unsubscribe = subscribe(() => {
      clearTimeout(timer);
      if (live && !document.hidden) poll();
    });
    poll();
    return () => {
      ended = true;
      clearTimeout(timer);
      controller?.abort();
      unsubscribe();
    };
  }, [key, seconds, round]);
  const reload = () => setRound((count) => count + 1);
  return state.key === key ? { ...state, reload } : { reload };
}
