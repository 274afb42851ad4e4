// Search from disk: a browser starts no worker from file://, so the worker's script runs in a hidden frame instead.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inside = this.frame.contentWindow, page = inside.document;
    page.open();
    page.write(`<script>
      postMessage = (data) => parent.postMessage(data, "*");
      importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
        const script = document.createElement("script");
        script.src = url; script.onload = done; script.onerror = failed; document.body.append(script);
      })), Promise.resolve());
    </script><script src="${url}"></script>`);
    page.close();
    this.ready = new Promise((resolve) => { this.frame.addEventListener("load", resolve); });
    addEventListener("message", (event) => {
      if (event.source !== inside) return;
      const message = new MessageEvent("message", { data: event.data });
      this.dispatchEvent(message);
      if (this.onmessage) this.onmessage(message);
    });
  }
  postMessage(data) {
    this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
  }
  terminate() { this.frame.remove(); }
}
if (location.protocol === "file:") window.Worker = FrameWorker;
