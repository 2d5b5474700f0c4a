/** The API key: kept for this tab only, asked for when the server wants one. */

const STORAGE_NAME = "transom.api_key";

/** Where the key lives between reloads of the tab. */
export class ApiKeyStore {
  get() {
    return sessionStorage.getItem(STORAGE_NAME);
  }

  set(key) {
    sessionStorage.setItem(STORAGE_NAME, key);
  }

  headers() {
    const key = this.get();
    return key === null ? {} : { Authorization: `Bearer ${key}` };
  }
}

/** Show the dialog until a key is given. */
export function askForKey(dialog, wasRefused) {
  const input = dialog.querySelector("input");
  dialog.querySelector("[data-refused]").hidden = !wasRefused;
  input.value = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    const form = dialog.querySelector("form");
    form.onsubmit = (event) => {
      event.preventDefault();
      const key = input.value.trim();
      if (!key) return;
      dialog.onclose = null;
      dialog.close();
      resolve(key);
    };
    dialog.onclose = () => dialog.showModal(); // without a key there is nothing to see
  });
}
