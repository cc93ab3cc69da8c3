/** Light or dark: Airflow's theme inside Airflow, else the system's. */

import { host } from "./airflow.js";

const root = document.documentElement;
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
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

function copyTheme() {
  const hostRoot = host.document.documentElement;
  const style = host.getComputedStyle(hostRoot);
  root.classList.toggle("dark", hostRoot.classList.contains("dark"));
  root.classList.toggle("light", !hostRoot.classList.contains("dark"));
  for (const [token, own] of Object.entries(TOKENS)) {
    const value = style.getPropertyValue(token).trim();
    if (value) root.style.setProperty(own, value);
    else root.style.removeProperty(own);
  }
  notify();
}

function notify() {
  for (const listener of listeners) listener();
}

/** Apply the theme, and follow its changes. */
export function startTheme() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", notify);
  if (!host) return;
  copyTheme();
  new MutationObserver(copyTheme).observe(host.document.documentElement, { attributeFilter: ["class", "style"] });
}
