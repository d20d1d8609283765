#!/usr/bin/env bash
# Hosts on one machine: network namespaces joined by a bridge, every link limited to a rate in each direction.
#
#   hosts.sh up NAME COUNT RATE SUBNET   namespaces NAMEh1 ... NAMEhCOUNT, eth0 of each at SUBNET.1 ... on bridge NAMEb,
#                                        where the machine itself is SUBNET.254. RATE as tc writes it, or "none".
#   hosts.sh shape NAME COUNT RATE       another rate
#   hosts.sh down NAME COUNT             removes all of it; what is not there is passed over
#
# Needs root and iproute2; the kernel needs network namespaces, veth, bridges and the token bucket (tbf).
set -euo pipefail

command=$1 name=$2 count=$3

# The bucket holds 1 ms of the rate, but at least two full packets: more would let whole small messages pass unhindered.
# The queue holds 512 kB: 4 ms at 1 Gbit/s.
limit() { # DEVICE RATE [COMMAND that runs tc inside the namespace ...]
  local device=$1 rate=$2 burst
  shift 2
  if [ "$rate" = none ]; then
    "$@" tc qdisc del dev "$device" root 2>/dev/null || true
    return
  fi
  case $rate in
    *gbit) burst=$((${rate%gbit} * 128))kb ;;
    *) burst=16kb ;;
  esac
  "$@" tc qdisc replace dev "$device" root tbf rate "$rate" burst "$burst" limit 512kb
}

# What a link carries is received by one processor: two would overtake each other, and TCP takes packets out of order for
# lost ones, sends them again, and slows down. A real adapter has a queue for each connection.
in_order() { # INTERFACE PROCESSOR [COMMAND ...]
  local setting=/sys/class/net/$1/queues/rx-0/rps_cpus mask
  mask=$(printf '%x' $((1 << $2)))
  shift 2
  "$@" sh -c "[ ! -e $setting ] || echo $mask >$setting"
}

shape() { # RATE
  for i in $(seq "$count"); do
    limit eth0 "$1" ip netns exec "${name}h$i"
    limit "${name}v$i" "$1"
  done
}

up() { # RATE SUBNET
  local rate=$1 subnet=$2 i k host cpus
  cpus=$(nproc --all)
  cpus=$((cpus < 32 ? cpus : 32)) # as many as one number of the mask has bits
  # nf_call_*: frames on the bridge are none of the machine's firewall's business
  ip link add "${name}b" type bridge stp_state 0 forward_delay 0 nf_call_iptables 0 nf_call_ip6tables 0
  ip addr add "$subnet.254/24" dev "${name}b"
  ip link set "${name}b" up
  for i in $(seq "$count"); do
    host=${name}h$i
    # `ip netns exec` puts these in place of /etc's: torch's store looks up every address it is called from, which
    # would wait 10 s for a name server that a namespace cannot reach.
    mkdir -p "/etc/netns/$host"
    echo "hosts: files" >"/etc/netns/$host/nsswitch.conf"
    {
      printf '127.0.0.1 localhost\n::1 localhost\n%s.254 machine\n::ffff:%s.254 machine\n' "$subnet" "$subnet"
      for k in $(seq "$count"); do
        printf '%s.%s h%s\n::ffff:%s.%s h%s\n' "$subnet" "$k" "$k" "$subnet" "$k" "$k"
      done
    } >"/etc/netns/$host/hosts"
    ip netns add "$host"
    ip link add "${name}v$i" type veth peer name eth0 netns "$host"
    ip link set "${name}v$i" master "${name}b" up
    ip -n "$host" addr add "$subnet.$i/24" dev eth0
    ip -n "$host" link set lo up
    ip -n "$host" link set eth0 up
    # bbr leaves part of a slow link idle behind a token bucket
    ip netns exec "$host" sysctl -qw net.ipv4.tcp_congestion_control=reno
    in_order "${name}v$i" $((i % cpus))
    in_order eth0 $((i % cpus)) ip netns exec "$host"
  done
  shape "$rate"
}

down() {
  for i in $(seq "$count"); do
    ip link del "${name}v$i" 2>/dev/null || true # takes eth0 with it
    ip netns del "${name}h$i" 2>/dev/null || true
    rm -f "/etc/netns/${name}h$i/hosts" "/etc/netns/${name}h$i/nsswitch.conf"
    rmdir "/etc/netns/${name}h$i" 2>/dev/null || true
  done
  ip link del "${name}b" 2>/dev/null || true
}

case $command in
  up) up "$4" "$5" ;;
  shape) shape "$4" ;;
  down) down ;;
  *) echo "hosts.sh: unknown command $command" >&2; exit 2 ;;
esac
