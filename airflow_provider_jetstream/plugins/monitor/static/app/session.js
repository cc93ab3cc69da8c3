/** The user's permissions and the page's settings. */

import { createContext, useContext } from "./html.js";

/**
 * @typedef {object} Me
 * @property {boolean} may_act
 * @property {boolean} payloads
 * @property {string} dag_id
 * @property {number} refresh_seconds
 * @property {string[]} connections
 * @property {string} version
 */

export const Session = createContext(/** @type {Me | null} */ (null));

/** @returns {Me} */
export const useMe = () => useContext(Session);
