"""The Lua scripts by which the Redis backend reads and writes. Redis runs each of them atomically.

Keys of the namespace `ns`. All contain `{ns}`, so that they are in one slot. A *field* is
`<service>/<id>`:

* `{ns}:records` HASH: field to record (JSON).
* `{ns}:owners` HASH: field to `<owner>:<lease in ms> <SHA-1 of the record>`. The owner is the
  backend that published the record.
* `{ns}:leases` ZSET: field to the end of its lease, in ms of the server's clock.
* `{ns}:index` ZSET: all fields with the score 0, to find those of one service by their prefix.
* `{ns}:versions` HASH: service to the number of its changes; the field "" counts all of them.
* `{ns}:log:<service>` LIST: ids of the last changes, one for each number. It may be lost at any
  time: then the service is read in full.
* `{ns}:began` STRING: when the first instance was published since the database was empty. Another
  value than before means that the server has lost its data.

`{ns}:changes` is a channel; each change publishes the service's name there.

Versions begin with the time in microseconds, so that numbers from before a loss of data do not come
again.

A server at `maxmemory` with `noeviction` refuses commands that may need memory, but not commands
that free some. Therefore a script removes ended leases only if leases can also be renewed.
Otherwise it would remove instances whose renewals were refused.
"""

from __future__ import annotations

from typing import Final

KEYS: Final = ("records", "owners", "leases", "index", "versions", "began")
"""Names of the keys that each script gets, without the prefix `{ns}:`."""

_HEAD: Final = """
local records, owners, leases, index, versions, began = unpack(KEYS)
local prefix, lease = ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)
local shortest_expiry = math.max(lease * 4, 60000)

local function write_at_maxmemory()
  -- A server at maxmemory refuses only the first write of a script, and only a write that may need
  -- memory. This one needs none and changes nothing. (`#!lua flags=allow-oom` needs Redis 7; this
  -- way was tried with Redis 5.0.6, 6.2.14 and 7.0.15, and Valkey 9.1.2.)
  redis.call('HDEL', owners, '')
end

local function call(command, key, items)
  -- in parts, because unpack() takes fewer than 8,000 items
  local replies = {}
  for first = 1, #items, 1000 do
    local last = math.min(first + 999, #items)
    local reply = redis.call(command, key, unpack(items, first, last))
    for at = 1, type(reply) == 'table' and last - first + 1 or 0 do
      replies[#replies + 1] = reply[at]
    end
  end
  return replies
end

local function count(name, changes)
  if redis.call('HINCRBY', versions, name, changes) == changes then
    redis.call('HSET', versions, name, string.format('%.0f', micros))
  end
end

local function announce(fields)
  -- before the change itself: if the change fails, the announcement does no harm
  local changed = {}
  for _, field in ipairs(fields) do
    local service, id = string.match(field, '^([^/]+)/(.*)$')
    if service then
      changed[service] = changed[service] or {}
      table.insert(changed[service], id)
    end
  end
  for service, ids in pairs(changed) do
    local log = prefix .. 'log:' .. service
    call('RPUSH', log, ids)
    redis.call('LTRIM', log, -1000, -1)
    redis.call('PEXPIRE', log, shortest_expiry)
    count(service, #ids)
    count('', #ids)
    redis.call('PUBLISH', prefix .. 'changes', service)
  end
end

local function remove(fields)
  announce(fields)
  call('HDEL', records, fields)
  call('HDEL', owners, fields)
  call('ZREM', leases, fields)
  call('ZREM', index, fields)
end

local function remove_ended()
  local ended = redis.call('ZRANGEBYSCORE', leases, '-inf', now)
  if #ended == 0 then return end
  write_at_maxmemory()
  -- If the server refuses to renew leases, it refuses this: the script fails, and removes nothing.
  redis.call('ZADD', leases, 'XX', now, ended[1])
  remove(ended)
end

local function accept_changes_by_hand()
  local total = redis.call('HLEN', records)
  if total == redis.call('ZCARD', leases) and total == redis.call('ZCARD', index) then return end
  write_at_maxmemory()
  local added, deleted = {}, {}
  for _, field in ipairs(redis.call('HKEYS', records)) do
    local has_lease = redis.call('ZADD', leases, 'NX', now + lease, field) == 0
    if redis.call('ZADD', index, 0, field) == 1 or not has_lease then table.insert(added, field) end
  end
  for _, key in ipairs({leases, index}) do
    for _, field in ipairs(redis.call('ZRANGE', key, 0, -1)) do
      if redis.call('HEXISTS', records, field) == 0 then table.insert(deleted, field) end
    end
  end
  announce(added)
  remove(deleted)
end

local function shorten_leases()
  -- A lease that ends later than it can was renewed before the server's clock was set back. Only
  -- the last one to end is looked at, so that this costs nothing while the clock is right.
  local function longest(field)
    local own = string.match(redis.call('HGET', owners, field) or '', ':(%d+) ')
    return now + tonumber(own or lease)
  end
  local last = redis.call('ZREVRANGE', leases, 0, 0, 'WITHSCORES')
  if #last == 0 or tonumber(last[2]) <= longest(last[1]) then return end
  write_at_maxmemory()
  local all = redis.call('ZRANGE', leases, 0, -1, 'WITHSCORES')
  for at = 1, #all, 2 do
    local most = longest(all[at])
    if tonumber(all[at + 1]) > most then redis.call('ZADD', leases, most, all[at]) end
  end
end

local function sweep()
  remove_ended()
  accept_changes_by_hand()
  shorten_leases()
end

local function keep()
  -- The keys of a namespace that is no longer used are deleted in the end.
  if redis.call('PTTL', records) < shortest_expiry then
    for _, key in ipairs({records, owners, leases, index, versions}) do
      redis.call('PEXPIRE', key, shortest_expiry)
    end
  end
end

local function data_began()
  if redis.call('EXISTS', began) == 0 then
    redis.call('SET', began, string.format('%.0f', micros))
  end
  return redis.call('GET', began)
end

local function epoch_of(record)
  if not record then return nil end
  local is_json, instance = pcall(cjson.decode, record)
  if is_json and type(instance) == 'table' then return instance['epoch'] end
end

local function is_owner(owner, entry)
  return entry and string.sub(entry, 1, #owner + 1) == owner .. ' '
end

local function pairs_after_owner()
  local fields, values = {}, {}
  for at = 4, #ARGV, 2 do
    table.insert(fields, ARGV[at])
    table.insert(values, ARGV[at + 1])
  end
  return fields, values
end
"""
"""Begins each script. ARGV of all scripts: the prefix `{ns}:`, the lease in ms, then their own."""

REGISTER: Final = (
    _HEAD
    + """
local owner, fields, published = ARGV[3], pairs_after_owner()
local found = call('HMGET', records, fields)
local changed, are_listed = {}, true
for at, field in ipairs(fields) do
  are_listed = are_listed and found[at]
  if found[at] ~= published[at] then table.insert(changed, field) end
end
if are_listed then write_at_maxmemory() end
announce(changed)
for at, field in ipairs(fields) do
  redis.call('HSET', records, field, published[at])
  redis.call('HSET', owners, field, owner .. ' ' .. redis.sha1hex(published[at]))
  redis.call('ZADD', leases, now + lease, field)
  redis.call('ZADD', index, 0, field)
end
keep()
return data_began()
"""
)
"""ARGV: owner, then field and record of each instance. Returns `began`.

At `maxmemory` it replaces records, and is refused if one of them is new.
"""

UNREGISTER: Final = (
    _HEAD
    + """
local owner, fields, epochs = ARGV[3], pairs_after_owner()
local gone = {}
for at, field in ipairs(fields) do
  local is_ours = owner == '' or is_owner(owner, redis.call('HGET', owners, field))
  if is_ours and epoch_of(redis.call('HGET', records, field)) == epochs[at] then
    table.insert(gone, field)
  end
end
write_at_maxmemory()
remove(gone)
"""
)
"""ARGV: owner, then field and epoch of each instance. With the owner "" those of all owners are
removed."""

RENEW: Final = (
    _HEAD
    + """
sweep()
write_at_maxmemory()
local owner, fields, epochs = ARGV[3], pairs_after_owner()
local found, entries = call('HMGET', records, fields), call('HMGET', owners, fields)
local lost, renewed, changed = {}, {}, {}
for at, field in ipairs(fields) do
  local is_there = found[at] and is_owner(owner, entries[at])
  local entry = is_there and owner .. ' ' .. redis.sha1hex(found[at])
  if is_there and entry ~= entries[at] then  -- changed by another program
    is_there = epoch_of(found[at]) == epochs[at]
    if is_there then
      table.insert(changed, field)
      redis.call('HSET', owners, field, entry)
    end
  end
  if is_there then
    table.insert(renewed, now + lease)
    table.insert(renewed, field)
  else
    table.insert(lost, field)
  end
end
announce(changed)
call('ZADD', leases, renewed)
keep()
return {data_began(), lost}
"""
)
"""ARGV: owner, then field and epoch of each instance. Returns `began`, and the fields that are
missing, of another owner or another epoch, or whose lease has ended."""

CHECK: Final = (
    _HEAD
    + """
sweep()
return {
  redis.call('GET', began) or '',
  redis.call('HGET', versions, '') or '0',
  redis.call('HLEN', records)
}
"""
)
"""Removes records whose lease has ended, and gives a lease to records without one. Returns `began`
or "", the version of the namespace and the number of its records. Unless one of them differs from
the time before, nothing has changed."""

READ: Final = (
    _HEAD
    + """
sweep()
local service, known = ARGV[3], tonumber(ARGV[4])
local log = prefix .. 'log:' .. service
local first, last = '[' .. service .. '/', '(' .. service .. '0'  -- '0' follows '/'
local version = redis.call('HGET', versions, service) or '0'
local changes = known and tonumber(version) - known or -1
local is_logged = changes >= 0 and changes <= redis.call('LLEN', log)
local fields, ids = {}, {}
if not is_logged then
  fields = redis.call('ZRANGEBYLEX', index, first, last)
  for at, field in ipairs(fields) do ids[at] = string.sub(field, #service + 2) end
elseif changes > 0 then
  ids = redis.call('LRANGE', log, -changes, -1)
  for at, id in ipairs(ids) do fields[at] = service .. '/' .. id end
end
local size = redis.call('ZLEXCOUNT', index, first, last)
return {
  redis.call('GET', began) or '',
  version, size, is_logged and 1 or 0, ids, call('HMGET', records, fields)
}
"""
)
"""ARGV: a service, and the version of it that is known or "".

Returns `began` or "", the version, the number of its records, whether what follows is only what has
changed since the known version, ids, and their records (None: removed).
"""
