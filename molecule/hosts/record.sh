#!/bin/sh
# Prints possible leftovers of a cluster on a host: files that no package owns, accounts, enabled units, rules and addresses.
# It omits files that packages and the container runtime write: alternatives, fonts, the linker's cache, hosts and resolv.conf. firewalld writes a zone's
# file with its first permanent rule, and keeps the previous file. So for zones, the script prints the rules.
export LC_ALL=C SYSTEMD_COLORS=0
dpkg-query -L $(dpkg-query -W -f '${binary:Package}\n') 2>/dev/null | sort -u >/tmp/owned
find /etc /opt /usr/local /srv /root /home /var/lib/systemd/linger /var/spool -xdev \( -type f -o -type l -o -type d \) \
  ! -path '/root/.ansible*' ! -path '/etc/alternatives/*' ! -path '/etc/fonts/*' ! -path /usr/local/share/fonts ! -path /etc/ld.so.cache ! -path '/etc/firewalld/zones/*' ! -path /etc/hosts ! -path /etc/resolv.conf \
  ! -name '*.pyc' ! -name '*-' | sort | comm -23 - /tmp/owned |
  while read -r name; do
    stat -c '%A %U %G %N' "$name"
    [ -L "$name" ] || [ ! -f "$name" ] || sha256sum "$name"
  done
rm /tmp/owned
getent passwd
getent group
systemctl list-unit-files --state=enabled --no-legend | sort
nft list ruleset 2>/dev/null | sed 's/ # handle .*//; s/counter packets [0-9]* bytes [0-9]*/counter/'
ip -oneline -4 address | awk '{print $2, $4}' | sort
firewall-cmd --permanent --list-all-zones 2>/dev/null | grep 'rule '
true
