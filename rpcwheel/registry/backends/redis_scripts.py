"""What Redis does for us, as four scripts: each is one step for all who look on.

Keys, of which all are in one slot of a cluster; `ns` is the namespace:

* `{ns}:h:<service>` HASH: record by id;
* `{ns}:z:<service>` ZSET: id by the time at which its lease ends, in ms of the server's own clock;
* `{ns}:o:<service>` HASH: by id, the backend whose lease that is, as `<name>:<lease in ms>`;
* `{ns}:s` ZSET: service by the same;
* `{ns}:n` HASH: by service, a number that grows with each change;
* `{ns}:g`: when this memory began, so that another one is known to be another.

`{ns}:c` is the channel of hints: `<service> <number>`. Numbers begin with the time in microseconds,
so that after a loss of memory they don't come again.

A server at `maxmemory` with `noeviction` refuses commands that may need memory, but not commands
that free some. Therefore a script removes ended leases only if leases can also be renewed.
Otherwise it would remove instances whose renewals were refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["LIST", "REGISTER", "RENEW", "UNREGISTER", "Keys"]


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of a namespace's keys."""

    namespace: str

    def of(self, service: str) -> list[str]:
        """Those that each script gets."""
        tag = f"{{{self.namespace}}}"
        own = [f"{tag}:{kind}:{service}" for kind in "hzo"]
        return [*own, f"{tag}:s", f"{tag}:n", f"{tag}:g"]

    @property
    def services(self) -> str:
        return f"{{{self.namespace}}}:s"

    @property
    def channel(self) -> str:
        return f"{{{self.namespace}}}:c"


_HEAD: Final = """
local hash, ends, owners, services, numbers, memory = unpack(KEYS)
local service, channel, lease, owner = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)

local function write_at_maxmemory()
  -- A server at maxmemory refuses only the first write of a script, and only a write that may need
  -- memory. This one needs none and changes nothing. (`#!lua flags=allow-oom` needs Redis 7; this
  -- way was tried with Redis 6.2.5 and 7.0.15, and Valkey 9.1.2.)
  redis.call('HDEL', owners, '')
end

local function began()
  redis.call('SET', memory, string.format('%.0f', micros), 'NX')
  return redis.call('GET', memory)
end

local function changed()
  redis.call('HSETNX', numbers, service, string.format('%.0f', micros))
  local number = redis.call('HINCRBY', numbers, service, 1)
  redis.call('PUBLISH', channel, service .. ' ' .. string.format('%.0f', number))
end

local function drop(id)
  redis.call('HDEL', hash, id)
  redis.call('ZREM', ends, id)
  redis.call('HDEL', owners, id)
end

local function keep()
  -- a service that nobody renews or lists any more is deleted in the end
  local most = math.max(lease * 4, 60000)
  for _, key in ipairs({hash, ends, owners}) do
    if redis.call('PTTL', key) < most then redis.call('PEXPIRE', key, most) end
  end
  local last = tonumber(redis.call('ZSCORE', services, service) or 0)
  if last < now + lease then redis.call('ZADD', services, now + lease, service) end
end

local function epoch_of(data)
  if not data then return nil end
  local good, record = pcall(cjson.decode, data)
  if good and type(record) == 'table' then return record['epoch'] end
end
"""

REGISTER: Final = (
    _HEAD
    + """
local listed = true
for at = 5, #ARGV, 2 do
  listed = listed and redis.call('HEXISTS', hash, ARGV[at]) == 1
end
if listed then write_at_maxmemory() end
for at = 5, #ARGV, 2 do
  redis.call('HSET', hash, ARGV[at], ARGV[at + 1])
  redis.call('ZADD', ends, now + lease, ARGV[at])
  redis.call('HSET', owners, ARGV[at], owner)
end
keep()
changed()
return began()
"""
)
"""ARGV: service, channel, lease in ms, owner, then id and record of each. Gives when this memory
began. At `maxmemory` it replaces records, and is refused if any of them is new."""

UNREGISTER: Final = (
    _HEAD
    + """
local gone = false
for at = 5, #ARGV, 2 do
  local ours = owner == '' or redis.call('HGET', owners, ARGV[at]) == owner
  if ours and epoch_of(redis.call('HGET', hash, ARGV[at])) == ARGV[at + 1] then
    drop(ARGV[at])
    gone = true
  end
end
if gone then changed() end
if redis.call('HLEN', hash) == 0 then redis.call('ZREM', services, service) end
return 1
"""
)
"""ARGV: service, channel, lease in ms, owner, then id and epoch of each. Without an owner (`""`)
those of the epoch go, whoever's lease it is."""

RENEW: Final = (
    _HEAD
    + """
write_at_maxmemory()
local lost = {}
for at = 5, #ARGV, 2 do
  local id = ARGV[at]
  local last = tonumber(redis.call('ZSCORE', ends, id) or 0)
  local ours = last > now and redis.call('HGET', owners, id) == owner
  if ours and epoch_of(redis.call('HGET', hash, id)) == ARGV[at + 1] then
    redis.call('ZADD', ends, now + lease, id)
  else
    lost[#lost + 1] = id
  end
end
if redis.call('EXISTS', hash) == 1 then keep() end
return {began(), lost}
"""
)
"""ARGV: service, channel, lease in ms, owner, then id and epoch of each. Gives when this memory
began, and the ids that are not there, are another's, or whose lease has ended."""

LIST: Final = (
    _HEAD
    + """
local number, count = ARGV[5], tonumber(ARGV[6])
local late = redis.call('ZRANGEBYSCORE', ends, '-inf', now)
if #late > 0 then
  write_at_maxmemory()
  -- if the server refuses renewals, it refuses this: the script fails, and removes nothing
  redis.call('ZADD', ends, 'XX', now, late[1])
end
for _, id in ipairs(late) do drop(id) end
local odd = redis.call('HLEN', hash) ~= redis.call('ZCARD', ends)
if odd then
  -- somebody else's hand: what has no end gets one, what has nothing but an end goes
  write_at_maxmemory()
  for _, id in ipairs(redis.call('HKEYS', hash)) do
    redis.call('ZADD', ends, 'NX', now + lease, id)
  end
  for _, id in ipairs(redis.call('ZRANGE', ends, 0, -1)) do
    if redis.call('HEXISTS', hash, id) == 0 then drop(id) end
  end
end
local after = string.format('(%.0f', now + lease)
local far = redis.call('ZRANGEBYSCORE', ends, after, '+inf', 'WITHSCORES')
for at = 1, #far, 2 do
  -- further away than a lease lasts: the clock was set back after the last renewal
  local longest = string.match(redis.call('HGET', owners, far[at]) or '', ':(%d+)$')
  if longest and tonumber(far[at + 1]) > now + tonumber(longest) then
    write_at_maxmemory()
    redis.call('ZADD', ends, now + tonumber(longest), far[at])
  end
end
if #late > 0 or odd then changed() end
if #late > 0 and redis.call('HLEN', hash) == 0 then redis.call('ZREM', services, service) end
local has = redis.call('HGET', numbers, service) or '0'
local began_at = redis.call('GET', memory) or ''
if has == number and redis.call('HLEN', hash) == count then return {began_at, has} end
return {began_at, has, redis.call('HGETALL', hash)}
"""
)
"""ARGV: service, channel, lease in ms, "", the number and how many records are known. Gives when
this memory began, the number, and the records, if the number or how many there are is another.

Removes records whose lease has ended, and gives ends to records that have none. An end that is
further away than the record's lease is long was written before the server's clock was set back: it
is moved, so that the record is removed one lease later at the latest."""
