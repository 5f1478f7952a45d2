"""The Lua scripts of the journal in Redis. Redis runs each of them atomically.

`RedisJournal` (in `redis`) runs one script per method of `JournalBackend`; `SCAN` serves `select`,
`retry` and `delete`. Each script begins with `_HEAD`, the functions that they share. The scripts
are f-strings, so braces of Lua are doubled. Their first argument is the prefix of all keys.

A *place* is a queue and a target: `<length of queue>:<queue><target>`. An id has 16 digits. Keys,
after the prefix:

* `version` STRING: of this schema.
* `id` STRING: the last id. Ids are times in microseconds, or the next number if that is used, so
  that no id is used again if the server has lost its last writes.
* `call:<id>` HASH: the call, with the fields in `FIELDS`. A TAKEN call also has `w`, its worker,
  and `n`, the number of the request that has taken it.
* `ids` ZSET: all calls, scored by id. A member is `<id>-<length of place>:<place>`, or if the call
  has an order key `<id>=<length of place>:<place><order key>`.
* `places` HASH: the number of calls by place. `taken`, `dead` HASH: of those in this state.
* `ready:<place>` ZSET: ids of READY calls, scored by the time when they are due.
* `live:<place>` ZSET: ids of calls that are not DEAD, scored by the time when they were stored.
* `order:<order>` ZSET: ids of calls with one order key that are not DEAD. An *order* is
  `<length of place>:<place><order key>`.
* `heads` HASH: by order, its *head*: the id of the only call that is READY or TAKEN. The others are
  BLOCKED.
* `workers` ZSET: workers, scored by the end of their lease. `held:<worker>` SET: its TAKEN calls.

States are those of `CallState`. Times are in ms of the server's clock.

A call is *lost* if its hash is (evicted, deleted by hand, or left out of a restore), but the other
keys still have its id. The script that meets it removes it from them, so that other calls are not
delayed. Each script returns its reply and a list of the lost calls that it has removed: place, age.

A server at `maxmemory` refuses only the first write of a script, and only one that may need memory.
So `append` is refused as a whole, and all other scripts begin with a write that needs none: calls
are taken and deleted also when the memory is full.
"""

from __future__ import annotations

from typing import Final

FIELDS: Final = ("q", "t", "m", "k", "b", "d", "c", "x", "a", "e", "o", "s", "r")
"""queue, target, method, key, body, due, created, expires, attempts, error, order key, state,
reason. A call without an order key or a reason does not have that field."""

MOST_LOST: Final = 1000
"""How many lost calls `TAKE` removes before it returns, as Redis serves nobody else meanwhile."""

_HEAD: Final = f"""
local P = ARGV[1]  -- the prefix of all keys
local READY, BLOCKED, TAKEN, DEAD = '0', '1', '2', '3'
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function call_of(id) return P .. 'call:' .. id end

-- a write that needs no memory, before all others
local function allow_writes_at_maxmemory() redis.call('HDEL', P .. 'heads', '') end

local function place_of(queue, target) return #queue .. ':' .. queue .. target end

-- change the number of calls of a place; `name` is places, taken or dead
local function add_to_count(name, place, change)
  if redis.call('HINCRBY', P .. name, place, change) == 0 then
    redis.call('HDEL', P .. name, place)
  end
end

local function read(id)
  return redis.call('HMGET', call_of(id), {", ".join(repr(name) for name in FIELDS)})
end

local function exists(id) return redis.call('EXISTS', call_of(id)) == 1 end

-- the member of `ids`; `order` is nil if there is no order key
local function member_of_ids(id, place, order)
  return id .. (order and '=' .. order or '-' .. #place .. ':' .. place)
end

-- find what the other keys have of a lost call; nil if it is in none
local function find_lost(id)
  local member = redis.call('ZRANGEBYSCORE', P .. 'ids', id, id)[1]
  if not member then return nil end
  local mark, length, text = member:match('^%d+([=-])(%d+):(.*)$')
  local place, state, worker = text:sub(1, length), BLOCKED, nil
  if redis.call('ZSCORE', P .. 'ready:' .. place, id) then
    state = READY
  elseif not redis.call('ZSCORE', P .. 'live:' .. place, id) then
    state = DEAD
  else
    for _, name in ipairs(redis.call('ZRANGE', P .. 'workers', 0, -1)) do
      if redis.call('SISMEMBER', P .. 'held:' .. name, id) == 1 then state, worker = TAKEN, name end
    end
  end
  local order = mark == '=' and length .. ':' .. text
  return {{place = place, order = order, state = state, worker = worker, is_lost = true}}
end

-- find a call, also a lost one: the argument `call` of the functions below; nil if there is none
local function find(id)
  local queue, target, order_key, state, worker = unpack(
    redis.call('HMGET', call_of(id), 'q', 't', 'o', 's', 'w'))
  if not queue then return find_lost(id) end
  local place = place_of(queue, target)
  local order = order_key and #place .. ':' .. place .. order_key
  return {{place = place, order = order, state = state, worker = worker}}
end

local function make_ready(id, place)
  redis.call('HSET', call_of(id), 's', READY)
  redis.call('ZADD', P .. 'ready:' .. place, redis.call('HGET', call_of(id), 'd'), id)
end

-- remove a TAKEN call from its worker
local function untake(id, call)
  redis.call('HDEL', call_of(id), 'w', 'n')
  redis.call('SREM', P .. 'held:' .. call.worker, id)
  add_to_count('taken', call.place, -1)
end

-- remove a call from those that are not DEAD: it is delivered, deleted or DEAD from now on
local function remove_live(id, call)
  redis.call('ZREM', P .. 'live:' .. call.place, id)
  if call.order then redis.call('ZREM', P .. 'order:' .. call.order, id) end
end

-- remove a call from all keys; the caller must call `update_head` afterwards
local function erase(id, call)
  if call.state == READY then redis.call('ZREM', P .. 'ready:' .. call.place, id) end
  if call.state == TAKEN then untake(id, call) end
  if call.state == DEAD then add_to_count('dead', call.place, -1) else remove_live(id, call) end
  redis.call('ZREMRANGEBYSCORE', P .. 'ids', id, id)
  redis.call('DEL', call_of(id))
  add_to_count('places', call.place, -1)
end

local lost = {{}}

-- erase a lost call; the caller must call `update_head` afterwards
local function erase_lost(id, call)
  erase(id, call)
  lost[#lost + 1] = {{call.place, now - math.floor(tonumber(id) / 1000)}}
end

-- Make the first call of an order the head, and ready, unless the head is taken. The head can be
-- another call: one that was removed, or one with a higher id, if a dead letter was retried.
local function update_head(call)
  if not call.order then return end
  local order = P .. 'order:' .. call.order
  local head = redis.call('HGET', P .. 'heads', call.order)
  if head and not redis.call('ZSCORE', order, head) then head = nil end
  local first = redis.call('ZRANGE', order, 0, 0)[1]
  while first and first ~= head and not exists(first) do
    local next_lost = find_lost(first)
    redis.call('ZREM', order, first)
    if next_lost then erase_lost(first, next_lost) end
    first = redis.call('ZRANGE', order, 0, 0)[1]
  end
  if not first then
    redis.call('HDEL', P .. 'heads', call.order)
  elseif first ~= head then
    if head then
      local is_taken = redis.call('ZREM', P .. 'ready:' .. call.place, head) == 0
      if is_taken then return end
      if exists(head) then redis.call('HSET', call_of(head), 's', BLOCKED) end
    end
    redis.call('HSET', P .. 'heads', call.order, first)
    make_ready(first, call.place)
  end
end

-- remove a call, and let the next one of its order be ready
local function remove(id, call)
  erase(id, call)
  if call.state ~= DEAD then update_head(call) end
end

-- make a TAKEN call ready again; removes a lost call in any state
local function give_back(id, call)
  if call.is_lost then
    erase_lost(id, call)
  else
    untake(id, call)
    make_ready(id, call.place)
  end
  update_head(call)
end

-- give all calls of a worker back, and end its lease
local function end_worker(worker)
  for _, id in ipairs(redis.call('SMEMBERS', P .. 'held:' .. worker)) do
    local call = find(id)
    if call then give_back(id, call) end
  end
  redis.call('DEL', P .. 'held:' .. worker)
  redis.call('ZREM', P .. 'workers', worker)
end
"""

APPEND: Final = f"""{_HEAD}
-- arguments: for each call those that are unpacked below; `age` is the maximum age
-- returns the ids
local arguments = 11
local calls = (#ARGV - 1) / arguments
local last = tonumber(redis.call('GET', P .. 'id') or 0)
local first = math.max(last + 1, time[1] * 1000000 + time[2])
redis.call('SET', P .. 'id', string.format('%.0f', first + calls - 1))
local ids = {{}}
for each = 0, calls - 1 do
  local queue, target, method, key, body, delay, age, attempts, error, has_order_key, order_key =
    unpack(ARGV, 2 + each * arguments, 1 + (each + 1) * arguments)
  local id = string.format('%.0f', first + each)
  local place, due, state, order = place_of(queue, target), now + delay, READY, nil
  ids[#ids + 1] = id
  if has_order_key == '1' then
    order = #place .. ':' .. place .. order_key
    if redis.call('HSETNX', P .. 'heads', order, id) == 0 then state = BLOCKED end
    redis.call('ZADD', P .. 'order:' .. order, id, id)
    redis.call('HSET', call_of(id), 'o', order_key)
  end
  redis.call('HSET', call_of(id), 'q', queue, 't', target, 'm', method, 'k', key, 'b', body,
    'd', due, 'c', now, 'x', now + age, 'a', attempts, 'e', error, 's', state)
  redis.call('ZADD', P .. 'ids', id, member_of_ids(id, place, order))
  redis.call('ZADD', P .. 'live:' .. place, now, id)
  if state == READY then redis.call('ZADD', P .. 'ready:' .. place, due, id) end
  add_to_count('places', place, 1)
end
return {{ids, lost}}
"""

TAKE: Final = f"""{_HEAD}
-- arguments: worker, lease, within, the number of the request; for each route queue, target, limit
-- returns the time, ids with `FIELDS`, and 1 if it stopped after many lost calls, so that there may
-- be more
local worker, lease, within, request = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local ended = redis.call('ZRANGEBYSCORE', P .. 'workers', '-inf', now)
if #ended > 0 then allow_writes_at_maxmemory() end
for _, name in ipairs(ended) do
  if name ~= worker then end_worker(name) end
end
local taken = {{}}
for at = 6, #ARGV, 3 do
  local place = place_of(ARGV[at], ARGV[at + 1])
  local ready = P .. 'ready:' .. place
  local limit, count, met_lost = tonumber(ARGV[at + 2]), 0, false
  repeat  -- again if there were lost calls among those of the limit
    local ids = redis.call(
      'ZRANGEBYSCORE', ready, '-inf', now + within, 'LIMIT', 0, limit - count)
    if #ids > 0 then allow_writes_at_maxmemory() end
    met_lost = false
    for _, id in ipairs(ids) do
      local fields = read(id)
      redis.call('ZREM', ready, id)
      if fields[1] then
        redis.call('SADD', P .. 'held:' .. worker, id)
        redis.call('HSET', call_of(id), 's', TAKEN, 'w', worker, 'n', request)
        fields[{FIELDS.index("s") + 1}] = TAKEN
        taken[#taken + 1] = {{id, fields}}
        count = count + 1
      else
        local call = find_lost(id)
        if call then
          erase_lost(id, call)
          update_head(call)
        end
        met_lost = true
      end
    end
  until not met_lost or #lost >= {MOST_LOST}
  if count > 0 then add_to_count('taken', place, count) end
end
if #taken > 0 then redis.call('ZADD', P .. 'workers', now + lease, worker) end
return {{{{now, taken, #lost >= {MOST_LOST} and 1 or 0}}, lost}}
"""

FREE_LOST: Final = f"""{_HEAD}
-- makes calls ready again that were taken by requests whose answers were lost
-- arguments: worker, the numbers of these requests
allow_writes_at_maxmemory()
for _, id in ipairs(redis.call('SMEMBERS', P .. 'held:' .. ARGV[2])) do
  local request = redis.call('HGET', call_of(id), 'n')
  for at = 3, #ARGV do
    if request == ARGV[at] then give_back(id, find(id)) end
  end
  local call = not request and find(id)
  if call and call.is_lost then give_back(id, call) end
end
return {{0, lost}}
"""

RENEW: Final = f"""{_HEAD}
-- arguments: worker, lease
-- returns 0 if the lease had ended
if not redis.call('ZSCORE', P .. 'workers', ARGV[2]) then return {{0, lost}} end
allow_writes_at_maxmemory()
redis.call('ZADD', P .. 'workers', now + ARGV[3], ARGV[2])
return {{1, lost}}
"""

REPORT: Final = f"""{_HEAD}
-- arguments: worker; for each result those that are unpacked below
-- returns the ids of the results that were ignored
allow_writes_at_maxmemory()
local late = {{}}
for at = 3, #ARGV, 6 do
  local id, kind, attempts, delay, error, reason = unpack(ARGV, at, at + 5)
  local call = find(id)
  if not call or call.state ~= TAKEN or call.worker ~= ARGV[2] then
    late[#late + 1] = id
  elseif kind == 'delivered' then
    remove(id, call)
  elseif call.is_lost then
    give_back(id, call)
  else
    redis.call('HSET', call_of(id), 'a', attempts, 'e', error)
    if kind == 'postponed' then
      redis.call('HSET', call_of(id), 'd', now + delay)
      give_back(id, call)
    else
      redis.call('HSET', call_of(id), 's', DEAD, 'r', reason)
      untake(id, call)
      remove_live(id, call)
      add_to_count('dead', call.place, 1)
      update_head(call)
    end
  end
end
return {{late, lost}}
"""

RELEASE: Final = f"""{_HEAD}
-- argument: worker
allow_writes_at_maxmemory()
end_worker(ARGV[2])
return {{0, lost}}
"""

COUNT: Final = f"""{_HEAD}
-- arguments: places
-- returns the time, and for each place the numbers of READY, live, TAKEN and DEAD calls, and when
-- the oldest live call was stored; live calls are those that are not DEAD
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

SCAN: Final = f"""{_HEAD}
-- arguments:
--   2 select, retry or delete
--   3 the largest number of calls
--   4 range or ids: whether the ids of a range are looked at, or those from argument 20
--   5, 6, 7 for a range: the id before it, the last id, and how many ids are looked at: the first
--     of them, but of retry and delete the last, as a change may make a later call READY or BLOCKED
--   8 to 19 six pairs, each '1' if there is this condition, and its value: states (their digits),
--     queue, target, method, error, age
-- returns the time; if there may be more, the last id that was looked at, otherwise an empty text;
-- the number of calls; the ids of selected calls with `FIELDS`
local action, limit = ARGV[2], tonumber(ARGV[3])
local ids, next = {{}}, ''
if ARGV[4] == 'range' then
  local before, last, most = '(' .. ARGV[5], ARGV[6], ARGV[7]
  if action == 'select' then
    ids = redis.call('ZRANGEBYSCORE', P .. 'ids', before, last, 'LIMIT', 0, most)
  else
    ids = redis.call('ZREVRANGEBYSCORE', P .. 'ids', last, before, 'LIMIT', 0, most)
  end
  for at, member in ipairs(ids) do ids[at] = member:match('^%d+') end
  if #ids == tonumber(most) then next = ids[#ids] end
else
  for at = 20, #ARGV do ids[#ids + 1] = ARGV[at] end
end
local function condition(at) return ARGV[at] == '1' and ARGV[at + 1] or nil end
local states, queue, target, method, error, age =
  condition(8), condition(10), condition(12), condition(14), condition(16), condition(18)

-- the position of the next character in UTF-8
local function after(text, at)
  repeat
    at = at + 1
    local byte = text:byte(at)
  until not byte or byte < 128 or byte > 191
  return at
end

local STAR, QUESTION_MARK = 42, 63

-- Whether a text matches the pattern `method`. `star` is the last * of the pattern so far, which
-- has matched the text before `star_end`. If the rest does not match, it takes one character more.
local function matches(text)
  local pattern, at, pattern_at, star, star_end = method, 1, 1, nil, nil
  while at <= #text do
    local wanted = pattern:byte(pattern_at)
    if wanted == STAR then
      star, star_end, pattern_at = pattern_at, at, pattern_at + 1
    elseif wanted == QUESTION_MARK then
      at, pattern_at = after(text, at), pattern_at + 1
    elseif wanted and wanted == text:byte(at) then
      at, pattern_at = at + 1, pattern_at + 1
    elseif star then
      star_end = after(text, star_end)
      at, pattern_at = star_end, star + 1
    else
      return false
    end
  end
  while pattern:byte(pattern_at) == STAR do pattern_at = pattern_at + 1 end
  return pattern_at > #pattern
end

-- whether a call meets all conditions; nil if it is lost
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

-- make a call due now, unless it is TAKEN; false then
local function retry(id)
  local call = find(id)
  if call.state == TAKEN then return false end
  redis.call('HSET', call_of(id), 'd', now)
  if call.state == READY then
    redis.call('ZADD', P .. 'ready:' .. call.place, now, id)
  elseif call.state == DEAD then
    local c, x = unpack(redis.call('HMGET', call_of(id), 'c', 'x'))
    redis.call('HSET', call_of(id), 'c', now, 'x', now + (x - c), 'a', '0', 's', BLOCKED)
    redis.call('HDEL', call_of(id), 'r')
    add_to_count('dead', call.place, -1)
    redis.call('ZADD', P .. 'live:' .. call.place, now, id)
    if call.order then
      redis.call('ZADD', P .. 'order:' .. call.order, id, id)
      update_head(call)
    else
      make_ready(id, call.place)
    end
  end
  return true
end

if action ~= 'select' then allow_writes_at_maxmemory() end
local selected, count, chosen_before = {{}}, 0, {{}}
if action ~= 'select' then  -- each change may make the next call of an order key READY
  for at, id in ipairs(ids) do chosen_before[at] = is_chosen(id) end
end
for at, id in ipairs(ids) do
  if count == limit then break end
  local chosen = chosen_before[at]
  if action == 'select' then chosen = is_chosen(id) end
  if chosen == nil and action ~= 'select' then
    local call = find(id)
    if call then give_back(id, call) end
  elseif chosen then
    if action == 'select' then
      selected[#selected + 1] = {{id, read(id)}}
      count = count + 1
    elseif action == 'delete' then
      remove(id, find(id))
      count = count + 1
    elseif retry(id) then
      count = count + 1
    end
  end
end
return {{{{now, next, count, selected}}, lost}}
"""
