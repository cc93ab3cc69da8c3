/** Light or dark: Airflow's theme inside Airflow, else the system's. */

import { host, isEmbedded } from "./place.js";

/** The element whose custom properties hold the colours. */
let root = /** @type {HTMLElement} */ (globalThis.document?.documentElement);
/** Airflow's custom properties that a deployment's theme may change, and the page's. */
const TOKENS = {
  "--chakra-colors-bg": "--bg",
  "--chakra-colors-fg": "--fg",
  "--chakra-colors-fg-muted": "--fg-muted",
  "--chakra-colors-brand-solid": "--accent",
  "--chakra-colors-brand-contrast": "--on-accent",
};
const listeners = new Set();

/** Call a listener when colours have changed, for content that CSS doesn't draw. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** @returns {string} the colour of a custom property, in a form that a canvas accepts */
export function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  (isEmbedded() ? root.shadowRoot : document.body)?.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

/** @param {HTMLElement} target @param {Window & typeof globalThis} source */
function copyTheme(target, source) {
  const sourceRoot = source.document.documentElement;
  const style = source.getComputedStyle(sourceRoot);
  target.classList.toggle("dark", sourceRoot.classList.contains("dark"));
  target.classList.toggle("light", !sourceRoot.classList.contains("dark"));
  for (const [token, own] of Object.entries(TOKENS)) {
    const value = style.getPropertyValue(token).trim();
    if (value) target.style.setProperty(own, value);
    else target.style.removeProperty(own);
  }
  notify();
}

function notify() {
  for (const listener of listeners) listener();
}

/**
 * Apply the theme to an element, and follow its changes.
 *
 * @param {HTMLElement} target
 * @param {(Window & typeof globalThis) | null} source the window with Airflow's page
 * @returns {() => void} stops it
 */
export function followTheme(target, source = host) {
  root = target;
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", notify);
  const copy = () => source && copyTheme(target, source);
  const changes = new MutationObserver(copy);
  if (source) {
    copy();
    changes.observe(source.document.documentElement, { attributeFilter: ["class", "style"] });
  }
  return () => {
    system.removeEventListener("change", notify);
    changes.disconnect();
  };
}
