<?php
// An array is sorted, summed, taken apart and put together.
ini_set('memory_limit', -1);
mt_srand(7);
for ($i = 0; $i < 500000; $i++) $all["k$i"] = mt_rand();
for ($round = 0; $round < 2; $round++) {
    asort($all);
    $sum = 0;
    foreach ($all as $key => $value) $sum = ($sum * 31 + $value + strlen($key)) % 1000000007;
    echo $sum, "\n";
    $all = array_merge(...array_reverse(array_chunk($all, 1000, true)));
}
