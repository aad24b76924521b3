#!/bin/sh
# The service manager of a virtual host on the loopback interface: keeps its sshd running.
# Arguments: the program sshd, the host's folder.
echo ready
exec < /dev/null > "$2/host.log" 2>&1
while :; do
    "$1" -D -f "$2/sshd_config" -E "$2/sshd.log" &
    wait $!
    sleep 1
done
