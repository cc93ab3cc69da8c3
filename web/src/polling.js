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

/** Render again when refreshing is paused or resumed. */
export function useLive() {
  const [, render] = useState(0);
  useEffect(() => subscribe(() => render((count) => count + 1)), []);
  return live;
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
