// heap.js [MIB]: objects, strings and typed arrays, re-read and changed over several collections; prints digests.
'use strict';
const crypto = require('crypto');

const size = Number(process.argv[2] || 120);
let state = 12345;
const random = (below) => (state = (Math.imul(state, 1103515245) + 12345) >>> 0) % below;

const objects = [];
for (let i = 0; i < size * 3500; i++)
  objects.push({ id: i, name: `object ${random(1e9)}`, links: [random(1000), i], next: objects[random(i + 1)] || null });
const table = new Map();
for (let i = 0; i < size * 800; i++) table.set(`key ${i}`, `${random(1e9)}`.repeat(8));
const arrays = [];
for (let i = 0; i < size * 4; i++) arrays.push(Float64Array.from({ length: 8192 }, (_, n) => (n % 2 ? n : random(1e6))));
console.log('built', objects.length, table.size, arrays.length);

for (let turn = 0; turn < 4; turn++) {
  const hash = crypto.createHash('sha256');
  let sum = 0;
  for (const object of objects) sum += object.links[0] + object.name.length + (object.next ? object.next.id : 0);
  for (const [key, value] of table) hash.update(key).update(value);
  for (const array of arrays) hash.update(array);
  console.log(turn, sum, hash.digest('hex').slice(0, 16));
  for (let i = 0; i < size * 500; i++) {
    const object = objects[random(objects.length)];
    object.name += '.';
    object.next = { id: turn, name: 'new', links: [turn, turn], next: null };
    arrays[random(arrays.length)][random(8192)] = turn;
    table.set(`key ${random(size * 800)}`, `changed ${i}`);
  }
}
