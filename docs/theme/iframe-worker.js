/* Pages opened from the file system may not start workers: there, the search runs in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.onmessage = this.onerror = null
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = "<!doctype html><title>search</title>"
      this.started = new Promise((resolve, reject) => {
        this.frame.onload = () => {
          const inside = this.frame.contentWindow
          inside.postMessage = (data) => setTimeout(() => this.onmessage?.({ data: structuredClone(data) }))
          const script = inside.document.createElement("script")
          script.src = new URL(url, location.href)
          script.onload = () => resolve(inside)
          script.onerror = () => { this.onerror?.(new Event("error")); reject(new Error(`${url} cannot be read`)) }
          inside.document.head.append(script)
        }
      })
      document.body.append(this.frame)
    }
    postMessage(data) { this.started.then((inside) => setTimeout(() => inside.onmessage?.({ data: inside.structuredClone(data) }))) }
    terminate() { this.frame.remove() }
  }
}
