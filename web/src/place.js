/**
 * Where the page runs: by itself, in Airflow's iframe, or as a view of Airflow's own page, where it is in a shadow root
 * and the address isn't its own.
 */

/** The page's own address, `…/jetstream/`: scripts are in its folder `static`. */
export const base = new URL("../", import.meta.url);

/** The window that shows Airflow, if the page is in its iframe. @type {(Window & typeof globalThis) | null} */
export const host = (() => {
  try {
    return window.parent !== window && window.parent.document ? /** @type {any} */ (window.parent) : null;
  } catch {
    return null;
  }
})();

let embedded = false;

/** Say that the page is a view of Airflow's own page. */
export function embed() {
  embedded = true;
}

/** @returns {boolean} whether the page is a view of Airflow's own page */
export const isEmbedded = () => embedded;
