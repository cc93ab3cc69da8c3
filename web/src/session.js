/** The user's permissions and the page's settings. */

import { createContext, useContext } from "./html.js";

/** @import { Me } from "./api_types" */

export const Session = createContext(/** @type {Me | null} */ (null));

/** @returns {Me} */
export const useMe = () => /** @type {Me} */ (useContext(Session));
