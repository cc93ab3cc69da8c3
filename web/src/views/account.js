/** The last account of the jobs that are gone, and a button that makes one. */

import { getAccount, makeAccount } from "../api.js";
import { exact, percent } from "../format.js";
import { html, useState } from "../html.js";
import { Ago, Facts, Failure } from "../components.js";
import { usePoll } from "../polling.js";
import { useMe } from "../session.js";

/** @import { Account } from "../api_types" */
/** @import { ApiError } from "../api.js" */

const SECONDS = 30;

/** @param {{connection: string, queue: string}} props */
export function AccountPanel({ connection, queue }) {
  const me = useMe();
  const poll = usePoll((signal) => getAccount(connection, queue, signal), SECONDS, `account/${connection}/${queue}`);
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  const [making, setMaking] = useState(false);
  const make = async () => {
    setMaking(true);
    setError(null);
    try {
      await makeAccount(connection, queue);
      poll.reload();
    } catch (problem) {
      setError(problem);
    }
    setMaking(false);
  };
  return html`
    <div class="panel padded">
      ${poll.data && html`<${Numbers} account=${poll.data} />`}
      ${error && html`<${Failure} error=${error} reload=${() => setError(null)} />`}
      ${me.may_act && html`<button type="button" disabled=${making} onClick=${make}>Account for them</button>`}
    </div>
  `;
}

/** @param {{account: Account}} props */
const Numbers = ({ account }) =>
  account.at
    ? html`<${Facts}
        pairs=${[
          ["As of", html`<${Ago} time=${account.at} />`],
          ["Ended", exact(account.ended)],
          ["Unaccounted", account.unaccounted ? `${exact(account.unaccounted)}: ${account.sequences}` : "none"],
          ["Not known", account.unknown ? `${exact(account.unknown)}, ${percent(account.unknown_share)}: ${account.why_unknown.join("; ")}` : null],
        ]}
      />`
    : html`<p class="hint">No account was made yet of how its jobs ended.</p>`;
