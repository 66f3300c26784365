# Matrices, lists and data frames.
set.seed(3)
cat(sprintf("%.6e\n", sum(crossprod(matrix(rnorm(1.2e6), 1200)))))
pairs <- lapply(1:200000, function(i) c(i, i^2))
invisible(gc())
cat(sum(sapply(pairs, sum)), "\n")
frame <- data.frame(key = sample(1e6), value = runif(1e6))
frame <- frame[order(frame$key), ]
cat(sprintf("%.8f\n", sum(frame$value * (1:1e6 %% 7))))
cat(sprintf("%.8f\n", sum(sapply(split(frame$value, frame$key %% 1000), sum))))
