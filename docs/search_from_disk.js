// Browsers refuse workers to pages from disk: there the search's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script src="${new URL(url, document.baseURI)}"></script>`;
      this.window = new Promise((resolve) => {
        frame.onload = () => {
          // What the script answers; the window's own postMessage would come back to the script.
          frame.contentWindow.postMessage = (data) =>
            this.dispatchEvent(new MessageEvent("message", { data }));
          resolve(frame.contentWindow);
        };
      });
      document.body.append(frame);
    }

    async postMessage(data) {
      (await this.window).dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
