/** Numbers and times as text for people. */

import { airflowZone, inZone, zoneName } from "./zone.js";

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const one = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const NONE = "–";

/** @param {number | null | undefined} number @returns {string} every digit */
export const exact = (number) => (number == null ? NONE : whole.format(number));

/** @param {number | null | undefined} number @returns {string} abbreviated from 100,000 on */
export const count = (number) => {
  if (number == null) return NONE;
  return number < 100_000 ? whole.format(number) : compact.format(number);
};

/** @param {number | null | undefined} number @returns {string} "1 letter", "2 letters" */
export const counted = (number, noun, nouns = `${noun}s`) => `${exact(number)} ${number === 1 ? noun : nouns}`;

/** @param {number | null | undefined} perSecond @returns {boolean} whether it reads better as a rate per minute */
export const isLow = (perSecond) => perSecond != null && perSecond > 0 && perSecond < 0.95;

/**
 * @param {number | null | undefined} perSecond
 * @param {boolean} [low] per minute; the same for rates that stand side by side
 * @returns {string} per second, or per minute for low rates
 */
export function rate(perSecond, low = isLow(perSecond)) {
  if (perSecond == null) return NONE;
  if (perSecond === 0) return low ? "0/min" : "0/s";
  if (low) return `${one.format(perSecond * 60)}/min`;
  return `${perSecond < 100 ? one.format(perSecond) : count(Math.round(perSecond))}/s`;
}

/** @param {number | null | undefined} size @returns {string} binary units */
export function bytes(size) {
  if (size == null) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit ? one.format(size) : whole.format(size)} ${units[unit]}`;
}

/** @param {number | null | undefined} seconds @returns {string} in its largest unit, with the next one for hours and days */
export function duration(seconds) {
  if (seconds == null) return NONE;
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  const hours = Math.floor(seconds / 3600);
  if (hours < 24) {
    const minutes = Math.floor((seconds % 3600) / 60);
    return minutes ? `${hours} h ${minutes} min` : `${hours} h`;
  }
  const rest = hours % 24;
  return rest ? `${Math.floor(hours / 24)} d ${rest} h` : `${hours / 24} d`;
}

/** @param {number} seconds @returns {string} of a short time, such as "0.2 s" */
export const took = (seconds) => (seconds < 60 ? `${seconds < 10 ? Math.round(seconds * 100) / 100 : Math.round(seconds)} s` : duration(seconds));

/** @returns {string} "3 min ago" */
export function ago(time, now = Date.now()) {
  if (!time) return NONE;
  const seconds = (now - Date.parse(time)) / 1000;
  return seconds < 2 ? "just now" : `${duration(seconds)} ago`;
}

/** @param {string | Date} time @returns {string} "02:41" */
export const hourOf = (time, zone = airflowZone()) => inZone(time, zone).slice(11, 16);

/** @param {string | Date} time @returns {string} "02:41:07" */
export const secondOf = (time, zone = airflowZone()) => inZone(time, zone).slice(11, 19);

/** @returns {string} date, time and zone, as Airflow shows them */
export const clock = (time, zone = airflowZone()) => (time ? `${inZone(time, zone)} ${zoneName(time, zone)}` : NONE);

/** @param {string} text @param {number} most characters @returns {string} its beginning, whole words; one that is cut ends with "…" */
export function shortened(text, most) {
  if (text.length <= most) return text;
  const end = text.lastIndexOf(" ", most);
  return `${text.slice(0, end > most / 2 ? end : most).trimEnd()} …`;
}

/** @returns {string} a share of one as per cent */
export const percent = (share) => `${share > 0 && share < 0.01 ? "<1" : Math.round(share * 100)} %`;
