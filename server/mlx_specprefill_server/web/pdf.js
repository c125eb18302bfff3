// The text of a PDF, page by page. What reads it is large, and loaded when the first PDF comes.

const LIBRARY = "/web/vendor/pdf.js";
const WORKER = "/web/vendor/pdf.worker.js";

/** The text; lines as they end in the file, pages apart. Errors are the library's, by name. */
export async function pdfText(data) {
  const { getDocument, GlobalWorkerOptions } = await import(LIBRARY);
  GlobalWorkerOptions.workerSrc = WORKER;
  const task = getDocument({ data, disableFontFace: true, useSystemFonts: false, useWasm: false, verbosity: 0 });
  try {
    const file = await task.promise;
    const pages = [];
    for (let number = 1; number <= file.numPages; number += 1) {
      const page = await file.getPage(number);
      const { items } = await page.getTextContent();
      pages.push(items.map(({ str, hasEOL }) => (hasEOL ? `${str}\n` : str)).join("").trim());
      page.cleanup();
    }
    return pages.filter(Boolean).join("\n\n");
  } finally {
    await task.destroy();
  }
}
