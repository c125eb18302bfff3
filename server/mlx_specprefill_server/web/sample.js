// A document and a question to begin with. Nobody wrote the logbook: it is made up, sentence by sentence.

import { request } from "./api.js";

export const SAMPLE = {
  name: "Logbook of a lighthouse",
  address: "/web/sample.txt",
  room: 100, // tokens for the question, the template and the answer
  question: "What is the secret code for the lantern room?",
};

export const sampleText = async () => (await request(SAMPLE.address)).text();
