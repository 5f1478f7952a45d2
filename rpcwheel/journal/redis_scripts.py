"""The Lua scripts of the journal in Redis. Redis runs each of them atomically.

A *place* is a queue and a target: `<length of queue>:<queue><target>`. An id has 16 digits. Keys,
with the prefix of the namespace:

* `version` STRING: of this schema.
* `id` STRING: the last id. Ids are times in microseconds, or the next number if that is used, so
  that no id comes again if the server has lost its last writes.
* `call:<id>` HASH: the fields in `FIELDS`, and `w`, the worker that has the call, and `n`, the
  number of the request that has taken it.
* `ids` ZSET: all calls by their ids, each as `<id>-<length of place>:<place>`, or with an order key
  `<id>=<length of place>:<place><order key>`.
* `places` HASH: place to the number of calls. `taken`, `dead` HASH: the same of these states.
* `ready:<place>` ZSET: ids of READY calls by the time when they are due.
* `live:<place>` ZSET: ids of calls that are not dead, by the time when they were stored.
* `order:<place and order key>` ZSET: ids of calls that are not dead; `heads` HASH: the one of them
  that is READY or TAKEN.
* `workers` ZSET: worker to the end of its lease. `held:<worker>` SET: ids of TAKEN calls.

States are those of `CallState`. Times are in ms of the server's clock.

If the hash of a call is lost (evicted, deleted by hand, or left out of a restore), the other keys
still have the call. The script that meets it removes it from them, so that other calls are not
delayed. Each script returns its reply and a list of the lost calls that it has removed: place, age.

A server at `maxmemory` refuses only the first write of a script, and only one that may need memory.
So `append` is refused as a whole, and all other scripts begin with a write that needs none: calls
are taken and deleted also when the memory is full.
"""

from __future__ import annotations

from typing import Final

FIELDS: Final = ("q", "t", "m", "k", "b", "d", "c", "x", "a", "e", "o", "s", "r")
"""queue, target, method, key, body, due, created, expires, attempts, error, order key, state,
reason. The order key and the reason exist only where there is one."""

MOST_LOST: Final = 1000
"""How many lost calls a request for calls removes before it returns."""

_HEAD: Final = f"""
local P = ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function call_of(id) return P .. 'call:' .. id end

local function allow_writes_at_maxmemory() redis.call('HDEL', P .. 'heads', '') end

local function place_of(queue, target) return #queue .. ':' .. queue .. target end

local function add(counts, place, number)
  if redis.call('HINCRBY', P .. counts, place, number) == 0 then
    redis.call('HDEL', P .. counts, place)
  end
end

local function read(id)
  return redis.call('HMGET', call_of(id), {", ".join(repr(name) for name in FIELDS)})
end

local function exists(id) return redis.call('EXISTS', call_of(id)) == 1 end

local function entry(id, place, order)
  return id .. (order and '=' .. order or '-' .. #place .. ':' .. place)
end

-- what the other keys have of a call whose hash is lost; nil if there is no such call
local function find_lost(id)
  local found = redis.call('ZRANGEBYSCORE', P .. 'ids', id, id)[1]
  if not found then return nil end
  local mark, length, text = found:match('^%d+([=-])(%d+):(.*)$')
  local place, state, worker = text:sub(1, length), '1', nil
  if redis.call('ZSCORE', P .. 'ready:' .. place, id) then
    state = '0'
  elseif not redis.call('ZSCORE', P .. 'live:' .. place, id) then
    state = '3'
  else
    for _, name in ipairs(redis.call('ZRANGE', P .. 'workers', 0, -1)) do
      if redis.call('SISMEMBER', P .. 'held:' .. name, id) == 1 then state, worker = '2', name end
    end
  end
  local order = mark == '=' and length .. ':' .. text
  return {{place = place, order = order, state = state, worker = worker, is_lost = true}}
end

-- what the other functions need to know of a call; nil if there is none
local function find(id)
  local found = redis.call('HMGET', call_of(id), 'q', 't', 'o', 's', 'w')
  if not found[1] then return find_lost(id) end
  local place = place_of(found[1], found[2])
  local order = found[3] and #place .. ':' .. place .. found[3]
  return {{place = place, order = order, state = found[4], worker = found[5]}}
end

local function make_ready(id, place)
  redis.call('HSET', call_of(id), 's', '0')
  redis.call('ZADD', P .. 'ready:' .. place, redis.call('HGET', call_of(id), 'd'), id)
end

-- a taken call is not taken any more
local function let_go(id, call)
  redis.call('HDEL', call_of(id), 'w', 'n')
  redis.call('SREM', P .. 'held:' .. call.worker, id)
  add('taken', call.place, -1)
end

-- a call is not waited for any more
local function end_life(id, call)
  redis.call('ZREM', P .. 'live:' .. call.place, id)
  if call.order then redis.call('ZREM', P .. 'order:' .. call.order, id) end
end

-- remove a call from all keys; `settle` follows
local function erase(id, call)
  if call.state == '0' then redis.call('ZREM', P .. 'ready:' .. call.place, id) end
  if call.state == '2' then let_go(id, call) end
  if call.state == '3' then add('dead', call.place, -1) else end_life(id, call) end
  redis.call('ZREMRANGEBYSCORE', P .. 'ids', id, id)
  redis.call('DEL', call_of(id))
  add('places', call.place, -1)
end

local lost = {{}}

-- erase a call whose hash is lost; `settle` follows
local function lose(id, call)
  erase(id, call)
  lost[#lost + 1] = {{call.place, now - math.floor(tonumber(id) / 1000)}}
end

-- make the first call of an order key ready, unless one is taken
local function settle(call)
  if not call.order then return end
  local order = P .. 'order:' .. call.order
  local head = redis.call('HGET', P .. 'heads', call.order)
  if head and not redis.call('ZSCORE', order, head) then head = nil end
  local first = redis.call('ZRANGE', order, 0, 0)[1]
  while first and first ~= head and not exists(first) do
    local next_lost = find_lost(first)
    redis.call('ZREM', order, first)
    if next_lost then lose(first, next_lost) end
    first = redis.call('ZRANGE', order, 0, 0)[1]
  end
  if not first then
    redis.call('HDEL', P .. 'heads', call.order)
  elseif first ~= head then
    if head then
      if redis.call('ZREM', P .. 'ready:' .. call.place, head) == 0 then return end  -- it is taken
      if exists(head) then redis.call('HSET', call_of(head), 's', '1') end
    end
    redis.call('HSET', P .. 'heads', call.order, first)
    make_ready(first, call.place)
  end
end

local function remove(id, call)
  erase(id, call)
  if call.state ~= '3' then settle(call) end
end

local function free(id, call)
  if call.is_lost then
    lose(id, call)
  else
    let_go(id, call)
    make_ready(id, call.place)
  end
  settle(call)
end

local function end_worker(worker)
  for _, id in ipairs(redis.call('SMEMBERS', P .. 'held:' .. worker)) do
    local call = find(id)
    if call then free(id, call) end
  end
  redis.call('DEL', P .. 'held:' .. worker)
  redis.call('ZREM', P .. 'workers', worker)
end
"""

APPEND: Final = f"""{_HEAD}
local fields = 11
local number = (#ARGV - 1) / fields
local last = tonumber(redis.call('GET', P .. 'id') or 0)
local first = math.max(last + 1, time[1] * 1000000 + time[2])
redis.call('SET', P .. 'id', string.format('%.0f', first + number - 1))
local ids = {{}}
for each = 0, number - 1 do
  local queue, target, method, key, body, delay, age, attempts, error, has_order, order =
    unpack(ARGV, 2 + each * fields, 1 + (each + 1) * fields)
  local id = string.format('%.0f', first + each)
  local place, due, state, name = place_of(queue, target), now + delay, '0', nil
  ids[#ids + 1] = id
  if has_order == '1' then
    name = #place .. ':' .. place .. order
    if redis.call('HSETNX', P .. 'heads', name, id) == 0 then state = '1' end
    redis.call('ZADD', P .. 'order:' .. name, id, id)
    redis.call('HSET', call_of(id), 'o', order)
  end
  redis.call('HSET', call_of(id), 'q', queue, 't', target, 'm', method, 'k', key, 'b', body,
    'd', due, 'c', now, 'x', now + age, 'a', attempts, 'e', error, 's', state)
  redis.call('ZADD', P .. 'ids', id, entry(id, place, name))
  redis.call('ZADD', P .. 'live:' .. place, now, id)
  if state == '0' then redis.call('ZADD', P .. 'ready:' .. place, due, id) end
  add('places', place, 1)
end
return {{ids, lost}}
"""
"""Arguments: for each call queue, target, method, key, body, delay, age, attempts, error, whether
it has an order key, the order key. Returns the ids."""

TAKE: Final = f"""{_HEAD}
local worker, lease, within, number = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local ended = redis.call('ZRANGEBYSCORE', P .. 'workers', '-inf', now)
if #ended > 0 then allow_writes_at_maxmemory() end
for _, name in ipairs(ended) do end_worker(name) end
local taken = {{}}
for at = 6, #ARGV, 3 do
  local place = place_of(ARGV[at], ARGV[at + 1])
  local ready = P .. 'ready:' .. place
  local limit, count, is_again = tonumber(ARGV[at + 2]), 0, false
  repeat
    local ids = redis.call(
      'ZRANGEBYSCORE', ready, '-inf', now + within, 'LIMIT', 0, limit - count)
    if #ids > 0 then allow_writes_at_maxmemory() end
    is_again = false
    for _, id in ipairs(ids) do
      local fields = read(id)
      redis.call('ZREM', ready, id)
      if fields[1] then
        redis.call('SADD', P .. 'held:' .. worker, id)
        redis.call('HSET', call_of(id), 's', '2', 'w', worker, 'n', number)
        fields[{FIELDS.index("s") + 1}] = '2'
        taken[#taken + 1] = {{id, fields}}
        count = count + 1
      else
        local call = find_lost(id)
        if call then
          lose(id, call)
          settle(call)
        end
        is_again = #lost < {MOST_LOST}
      end
    end
  until not is_again
  if count > 0 then add('taken', place, count) end
end
if #taken > 0 then redis.call('ZADD', P .. 'workers', now + lease, worker) end
return {{{{now, taken, #lost >= {MOST_LOST} and 1 or 0}}, lost}}
"""
"""Arguments: worker, lease, within, the number of the request; for each route queue, target, limit.
Returns the time, ids with `FIELDS`, and whether there may be more, after many lost calls."""

FREE_LOST: Final = f"""{_HEAD}
allow_writes_at_maxmemory()
for _, id in ipairs(redis.call('SMEMBERS', P .. 'held:' .. ARGV[2])) do
  local number = redis.call('HGET', call_of(id), 'n')
  for at = 3, #ARGV do
    if number == ARGV[at] then free(id, find(id)) end
  end
  local call = not number and find(id)
  if call and call.is_lost then free(id, call) end
end
return {{0, lost}}
"""
"""Arguments: worker, numbers of requests."""

RENEW: Final = f"""{_HEAD}
if not redis.call('ZSCORE', P .. 'workers', ARGV[2]) then return {{0, lost}} end
allow_writes_at_maxmemory()
redis.call('ZADD', P .. 'workers', now + ARGV[3], ARGV[2])
return {{1, lost}}
"""
"""Arguments: worker, lease."""

REPORT: Final = f"""{_HEAD}
allow_writes_at_maxmemory()
local late = {{}}
for at = 3, #ARGV, 6 do
  local id, kind, attempts, delay, error, reason = unpack(ARGV, at, at + 5)
  local call = find(id)
  if not call or call.state ~= '2' or call.worker ~= ARGV[2] then
    late[#late + 1] = id
  elseif kind == 'delivered' then
    remove(id, call)
  elseif call.is_lost then
    free(id, call)
  else
    redis.call('HSET', call_of(id), 'a', attempts, 'e', error)
    if kind == 'postponed' then
      redis.call('HSET', call_of(id), 'd', now + delay)
      free(id, call)
    else
      redis.call('HSET', call_of(id), 's', '3', 'r', reason)
      let_go(id, call)
      end_life(id, call)
      add('dead', call.place, 1)
      settle(call)
    end
  end
end
return {{late, lost}}
"""
"""Arguments: worker; for each result id, kind, attempts, delay, error, reason. Returns the ids of
the results that were ignored."""

RELEASE: Final = f"""{_HEAD}
allow_writes_at_maxmemory()
end_worker(ARGV[2])
return {{0, lost}}
"""
"""Arguments: worker."""

COUNT: Final = f"""{_HEAD}
local rows = {{}}
for at = 2, #ARGV do
  local place = ARGV[at]
  local live = P .. 'live:' .. place
  rows[#rows + 1] = {{
    redis.call('ZCARD', P .. 'ready:' .. place),
    redis.call('ZCARD', live),
    tonumber(redis.call('HGET', P .. 'taken', place) or 0),
    tonumber(redis.call('HGET', P .. 'dead', place) or 0),
    redis.call('ZRANGE', live, 0, 0, 'WITHSCORES')[2] or string.format('%.0f', now),
  }}
end
return {{{{now, rows}}, lost}}
"""
"""Arguments: places. Returns the time, and the numbers of ready, live, taken and dead calls, and
when the oldest live call was stored."""

SCAN: Final = f"""{_HEAD}
local action, limit = ARGV[2], tonumber(ARGV[3])
local ids, next = {{}}, ''
if ARGV[4] == 'range' then
  ids = redis.call('ZRANGEBYSCORE', P .. 'ids', '(' .. ARGV[5], ARGV[6], 'LIMIT', 0, ARGV[7])
  for at, found in ipairs(ids) do ids[at] = found:match('^%d+') end
  if #ids == tonumber(ARGV[7]) then next = ids[#ids] end
else
  for at = 20, #ARGV do ids[#ids + 1] = ARGV[at] end
end
local function given(at) return ARGV[at] == '1' and ARGV[at + 1] or nil end
local states, queue, target, method, error, age =
  given(8), given(10), given(12), given(14), given(16), given(18)

local function after(text, at)  -- the next character in UTF-8
  repeat
    at = at + 1
    local byte = text:byte(at)
  until not byte or byte < 128 or byte > 191
  return at
end

local function matches(text)
  local at, place, star, mark = 1, 1, nil, nil
  while at <= #text do
    local wanted = method:byte(place)
    if wanted == 42 then  -- *
      star, mark, place = place, at, place + 1
    elseif wanted == 63 then  -- ?
      at, place = after(text, at), place + 1
    elseif wanted and wanted == text:byte(at) then
      at, place = at + 1, place + 1
    elseif star then
      mark = after(text, mark)
      at, place = mark, star + 1
    else
      return false
    end
  end
  while method:byte(place) == 42 do place = place + 1 end
  return place > #method
end

-- nil if its hash is lost
local function is_chosen(id)
  local q, t, m, e, r, c, s = unpack(
    redis.call('HMGET', call_of(id), 'q', 't', 'm', 'e', 'r', 'c', 's'))
  if not q then return nil end
  return (not states or states:find(s, 1, true))
    and (not queue or q == queue)
    and (not target or t == target)
    and (not age or tonumber(c) <= now - age)
    and (not error or e:find(error, 1, true) or (r and r:find(error, 1, true)))
    and (not method or matches(m)) or false
end

local function retry(id)
  local call = find(id)
  if call.state == '2' then return false end
  redis.call('HSET', call_of(id), 'd', now)
  if call.state == '0' then
    redis.call('ZADD', P .. 'ready:' .. call.place, now, id)
  elseif call.state == '3' then
    local c, x = unpack(redis.call('HMGET', call_of(id), 'c', 'x'))
    redis.call('HSET', call_of(id), 'c', now, 'x', now + (x - c), 'a', '0', 's', '1')
    redis.call('HDEL', call_of(id), 'r')
    add('dead', call.place, -1)
    redis.call('ZADD', P .. 'live:' .. call.place, now, id)
    if call.order then
      redis.call('ZADD', P .. 'order:' .. call.order, id, id)
      settle(call)
    else
      make_ready(id, call.place)
    end
  end
  return true
end

if action ~= 'select' then allow_writes_at_maxmemory() end
local found, number = {{}}, 0
for _, id in ipairs(ids) do
  if number == limit then break end
  local chosen = is_chosen(id)
  if chosen == nil and action ~= 'select' then
    local call = find(id)
    if call then free(id, call) end
  elseif chosen then
    if action == 'select' then
      found[#found + 1] = {{id, read(id)}}
      number = number + 1
    elseif action == 'delete' then
      remove(id, find(id))
      number = number + 1
    elseif retry(id) then
      number = number + 1
    end
  end
end
return {{{{now, next, number, found}}, lost}}
"""
"""Arguments: select, retry or delete; the largest number of calls; 'range' or 'ids'; for a range
the id before it, the last id, and the number of ids; six pairs, each whether there is a condition,
and its value: states, queue, target, method, error, age; the ids. Returns the time, the last id
that was looked at if there may be more, the number of calls, and the ids with `FIELDS` of selected
ones."""
