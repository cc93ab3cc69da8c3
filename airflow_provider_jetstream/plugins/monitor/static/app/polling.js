/** Live data: asked for again every few seconds, but neither while nobody looks nor while the person has stopped it. */

import { useEffect, useState } from "./html.js";

/** Seconds until a question is asked again that wasn't answered. */
const RETRY = 3;

let live = true;
const listeners = new Set();

/** Tell whether pages refresh by themselves. */
export const isLive = () => live;

/** Stop or go on refreshing. */
export function setLive(on) {
  live = on;
  for (const listener of listeners) listener();
}

/** Draw again when refreshing was stopped or goes on. */
export function useLive() {
  const [, draw] = useState(0);
  useEffect(() => watch(() => draw((count) => count + 1)), []);
  return live;
}

function watch(listener) {
  listeners.add(listener);
  document.addEventListener("visibilitychange", listener);
  return () => {
    listeners.delete(listener);
    document.removeEventListener("visibilitychange", listener);
  };
}

/**
 * Keep data fresh. While an answer is missing the last one stays, together with the error.
 *
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} load asks for it
 * @param {number} seconds between an answer and the next question
 * @param {string} key what the data is about; other data starts from nothing
 * @returns {{data?: T, error?: Error, at?: number, reload: () => void}}
 */
export function usePoll(load, seconds, key) {
  const [state, setState] = useState({ key });
  const [round, setRound] = useState(0);
  useEffect(() => {
    let timer;
    let asked;
    let ended = false;
    const look = async () => {
      clearTimeout(timer);
      asked?.abort();
      const mine = (asked = new AbortController());
      let found;
      try {
        found = { key, data: await load(mine.signal), error: undefined, at: Date.now() };
      } catch (error) {
        found = { key, error };
      }
      if (ended || mine.signal.aborted) return;
      asked = undefined;
      setState((old) => (old.key === key ? { ...old, ...found } : found));
      const pause = found.error ? Math.min(seconds, RETRY) : seconds;
      if (live && !document.hidden) timer = setTimeout(look, pause * 1000);
    };
    const unwatch = watch(() => {
      clearTimeout(timer);
      if (live && !document.hidden) look();
    });
    look();
    return () => {
      ended = true;
      clearTimeout(timer);
      asked?.abort();
      unwatch();
    };
  }, [key, seconds, round]);
  const reload = () => setRound((count) => count + 1);
  return state.key === key ? { ...state, reload } : { reload };
}
