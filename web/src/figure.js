/** Numbers of the API: each comes with its age and its certainty, and no view shows it without them. */

import { NONE, clock, count, duration, hourOf } from "./format.js";
import { html } from "./html.js";

/** @import { Figure } from "./api_types" */

const MEANINGS = {
  exact: "",
  about: "counted, not proved",
  at_least: "at least: a part isn't known yet",
  old: "has changed since; a new number isn't known yet",
  unknown: "not known yet",
};
/** From the least to the most that has to be said. @type {Figure["certainty"][]} */
const DOUBTS = ["exact", "about", "at_least", "old"];

/** @type {Figure} */
const UNKNOWN = { value: null, age: null, certainty: "unknown" };

/** @param {Figure} figure @returns {number} to compare and to sort by; 0 where it isn't known */
export const sizeOf = (figure) => figure.value ?? 0;

/** @param {Figure} figure @returns {boolean} whether something may have changed since */
export const isOld = (figure) => figure.certainty === "old";

/** @param {Figure} figure @returns {Date} as of when it is */
const timeOf = (figure) => new Date(Date.now() - (figure.age ?? 0) * 1000);

/** @param {Figure} figure @returns {string} age and certainty, a sentence */
export function certaintyOf(figure) {
  if (figure.value == null) return `Not known yet`;
  const meaning = MEANINGS[figure.certainty];
  return `As of ${clock(timeOf(figure))}, ${duration(figure.age)} ago${meaning ? `; ${meaning}` : ""}`;
}

/** @param {Figure[]} figures @returns {Figure} their sum, as old and as uncertain as the worst of them */
export function sumOf(figures) {
  const known = figures.filter((figure) => figure.value != null);
  if (!figures.length) return { value: 0, age: 0, certainty: "exact" };
  if (!known.length) return UNKNOWN;
  const doubts = known.map((figure) => DOUBTS.indexOf(figure.certainty));
  if (known.length < figures.length) doubts.push(DOUBTS.indexOf("at_least"));
  return {
    value: known.reduce((total, figure) => total + sizeOf(figure), 0),
    age: Math.max(...known.map((figure) => figure.age ?? 0)),
    certainty: DOUBTS[Math.max(...doubts)],
  };
}

/**
 * A number; an old one is grey, with the time as of which it is.
 *
 * @param {{of: Figure, show?: (value: number) => string, what?: string, dated?: boolean}} props
 *   `dated` is false where the time stands beside it
 */
export function Shown({ of, show = count, what = "", dated = true }) {
  const title = `${what ? `${what}. ` : ""}${certaintyOf(of)}`;
  if (of.value == null) return html`<span class="figure" title=${title}>${NONE}</span>`;
  const value = `${of.certainty === "at_least" ? "≥ " : ""}${show(of.value)}`;
  if (!isOld(of)) return html`<span class="figure" title=${title}>${value}</span>`;
  return html`<span class="figure old" title=${title}>${value}${dated && html` <${AsOf} of=${of} />`}</span>`;
}

/** As of when an old number is. @param {{of: Figure}} props */
export const AsOf = ({ of }) => html`<small class="as-of">as of ${hourOf(timeOf(of))}</small>`;
