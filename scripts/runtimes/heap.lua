-- Memory of C and tables of Lua are filled and read.
local ffi, words, seed = require 'ffi', 3000000, 1
local memory, tables = ffi.new('uint32_t[?]', words), {}
for i = 0, words - 1 do
  seed = (seed * 1103515245 + 12345) % 2147483648
  memory[i] = seed
end
for i = 1, 200000 do tables[i] = {i, tostring(i)} end
for round = 1, 3 do
  local sum = 0
  for i = 0, words - 1, 7 do sum = (sum + memory[i]) % 1000000007 end
  for i = 1, #tables do sum = (sum + tables[i][1] + #tables[i][2]) % 1000000007 end
  collectgarbage()
  print(sum)
end
