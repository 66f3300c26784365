% Matrices and cells.
a = reshape(mod((1:1440000) * 7919, 1009), 1200, 1200);
printf('%.10e\n', sum((a * a')(:)));
printf('%.10e\n', sum(sort(a(:))(1:7:end)));
c = cell(1, 50000);
for i = 1:50000, c{i} = ones(1, mod(i, 50)); end
printf('%d\n', sum(cellfun(@numel, c)));
